"""Launches products whose left operand is decoded weight rows."""

from __future__ import annotations

import torch

from compiled_mtp.ops.descriptors import is_describable
from compiled_mtp.ops.device import device_of
from compiled_mtp.ops.k_splits import add_tree
from compiled_mtp.ops.left_config import hopper_tile, left_tile
from compiled_mtp.ops.left_large_m import launch_left_large_m
from compiled_mtp.ops.left_operand import LeftWeight
from compiled_mtp.ops.left_product import UNIT, launch_left


def launch_left_product(
    x: torch.Tensor, weight: LeftWeight, k_splits: int, dtype: torch.dtype, gated: bool = False
) -> torch.Tensor:
    """[k_splits, M, N] of K in `k_splits` K splits, or [1, M, N / 2] where gated."""
    rows, n = x.shape[0], weight.words.shape[0]
    device = device_of(x.device.index)
    if rows > 0 and device.arch == "sm_90" and is_describable(x):
        units = x.shape[1] // UNIT // k_splits
        large = hopper_tile(rows, n, k_splits, units, weight.form, device.num_processors)
        if large is not None:
            return launch_left_large_m(large, x, weight, k_splits, dtype, gated)
    tile = left_tile(rows, n, k_splits, gated, weight.form, device)
    return launch_left(tile, x, weight, k_splits, dtype, gated)


def launch_left_partials(
    x: torch.Tensor, weight: LeftWeight, k_splits: int, count: int, dtype: torch.dtype
) -> torch.Tensor:
    """[count, M, N]: the sums of `k_splits` K splits, added as `count` subtrees."""
    partials = launch_left_product(x, weight, k_splits, torch.float32 if count < k_splits else dtype)
    if count < k_splits:
        partials = torch.stack([add_tree(part) for part in partials.chunk(count)]).to(dtype)
    return partials
