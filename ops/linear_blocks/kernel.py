"""Launches the products of weights in scaled codes, and the reading of their rows."""

from __future__ import annotations

from typing import Any

import torch

from compiled_mtp.ops.blocks import KINDS
from compiled_mtp.ops.k_splits import add_tree, count_k_splits
from compiled_mtp.ops.linear_blocks.config import tile_of
from compiled_mtp.ops.linear_blocks.product_kernel import launch_tile
from compiled_mtp.ops.linear_blocks.values_kernel import decode_rows, values_of
from compiled_mtp.ops.prefill_triton import launch_prefill


def launch(args: Any) -> torch.Tensor:
    dtype = torch.float32 if args.out_float32 else args.x.dtype
    if args.prefill:
        return launch_prefill(args.x, values_of(args.weight, args.weight_scale, args.kind), dtype)
    return launch_product(args.x, args.weight, args.weight_scale, args.kind, 1, dtype)[0]


def launch_linear_blocks_silu_mul(args: Any) -> torch.Tensor:
    weights = (args.weight, args.weight_scale, args.kind)
    return launch_product(args.x, *weights, 1, args.x.dtype, gated=True)[0]


def launch_linear_blocks_partials(args: Any) -> torch.Tensor:
    x, weights = args.x, (args.weight, args.weight_scale, args.kind)
    k, whole = x.shape[1], args.whole_k or x.shape[1]
    is_sum = args.count == 1 and k == whole
    dtype = x.dtype if is_sum and not args.stacked else torch.float32
    if args.prefill:
        sums = launch_prefill(x, values_of(*weights), dtype)
        return sums if args.stacked else sums[None]
    k_splits = count_k_splits(whole) * k // whole
    partials = launch_product(x, *weights, k_splits, torch.float32 if args.count < k_splits else dtype)
    if args.count < k_splits:
        partials = torch.stack([add_tree(part) for part in partials.chunk(args.count)]).to(dtype)
    return partials.flatten(0, 1) if args.stacked else partials


def launch_block_rows(args: Any) -> torch.Tensor:
    return decode_rows(args.ids, args.weight, args.weight_scale, args.kind)


def launch_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    kind: str,
    k_splits: int,
    dtype: torch.dtype,
    gated: bool = False,
) -> torch.Tensor:
    """[k_splits, M, N] of K in `k_splits` K splits, or [1, M, N / 2] where gated."""
    tile = tile_of(x.shape[0], weight.shape[0], k_splits, gated, KINDS[kind])
    return launch_tile(tile, x, weight, weight_scale, kind, k_splits, dtype, gated)
