"""Launches the products of weights in scaled codes, and the reading of their rows."""

from __future__ import annotations

from typing import Any

import torch

from compiled_mtp.ops.k_splits import count_k_splits, is_sum
from compiled_mtp.ops.left_config import form_of_kind
from compiled_mtp.ops.left_launch import launch_left_partials, launch_left_product
from compiled_mtp.ops.left_operand import LeftWeight
from compiled_mtp.ops.linear_blocks.values_kernel import decode_rows, values_of
from compiled_mtp.ops.prefill_triton import launch_prefill


def left_weight(args: Any) -> LeftWeight:
    return LeftWeight(args.weight, args.weight_scale.view(-1).view(torch.int32), form_of_kind(args.kind))


def launch(args: Any) -> torch.Tensor:
    dtype = torch.float32 if args.out_float32 else args.x.dtype
    if args.prefill:
        return launch_prefill(args.x, values_of(args.weight, args.weight_scale, args.kind), dtype)
    return launch_left_product(args.x, left_weight(args), 1, dtype)[0]


def launch_linear_blocks_silu_mul(args: Any) -> torch.Tensor:
    return launch_left_product(args.x, left_weight(args), 1, args.x.dtype, gated=True)[0]


def launch_linear_blocks_partials(args: Any) -> torch.Tensor:
    x = args.x
    k, whole = x.shape[1], args.whole_k or x.shape[1]
    is_rounded = is_sum(k, args.count, whole) and not args.stacked
    dtype = x.dtype if is_rounded else torch.float32
    if args.prefill:
        sums = launch_prefill(x, values_of(args.weight, args.weight_scale, args.kind), dtype)
        return sums if args.stacked else sums[None]
    k_splits = count_k_splits(whole) * k // whole
    partials = launch_left_partials(x, left_weight(args), k_splits, args.count, dtype)
    return partials.flatten(0, 1) if args.stacked else partials


def launch_block_rows(args: Any) -> torch.Tensor:
    return decode_rows(args.ids, args.weight, args.weight_scale, args.kind)
