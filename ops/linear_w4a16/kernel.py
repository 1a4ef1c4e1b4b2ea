"""Launches the products of four-bit weights (ops.left_operand).

A prompt's rows are multiplied by the weight's values, rounded to bfloat16.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from compiled_mtp.ops.int4 import UNIT
from compiled_mtp.ops.int4_triton import decode, minus_of, scale_of
from compiled_mtp.ops.k_splits import count_k_splits, is_sum
from compiled_mtp.ops.left_config import form_of_int4
from compiled_mtp.ops.left_launch import launch_left_partials, launch_left_product
from compiled_mtp.ops.left_operand import LeftWeight
from compiled_mtp.ops.prefill_triton import launch_prefill

# Weight rows of a program that multiplies a weight out.
VALUE_ROWS = 32


@triton.jit
def w4a16_values_kernel(
    weight,
    weight_scale,
    out,
    n,
    BN: tl.constexpr,
    PER_UNIT: tl.constexpr,
    ON_DEVICE: tl.constexpr,
):
    """The values of BN weight rows in one unit, rounded to bfloat16."""
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    unit, units = tl.program_id(1), tl.num_programs(1)
    inside = row < n
    word = tl.arange(0, 32)
    words_at = weight + ((row // 16).to(tl.int64) * units + unit)[None, :] * 512
    words_at += (row % 16 * 32)[None, :] + word[:, None]
    words = tl.load(words_at, mask=inside[None, :], other=0)
    group_at = weight_scale.to(tl.pointer_type(tl.int32)) + unit * PER_UNIT * n + row
    to = out + (row.to(tl.int64) * units + unit)[None, :] * 128 + word[:, None]
    for index in tl.static_range(4):
        group = tl.load(group_at + index * PER_UNIT // 4 * n, mask=inside, other=0)
        minus = minus_of(group, words)
        values = decode(words, minus, minus, minus, minus, ON_DEVICE)[index]
        scaled = values.to(tl.float32) * scale_of(group, weight_scale.dtype.element_ty)[None, :]
        tl.store(to + index * 32, scaled.to(tl.bfloat16), mask=inside[None, :])


def left_weight(weight: torch.Tensor, weight_scale: torch.Tensor) -> LeftWeight:
    """The weight as products read it."""
    per_unit = weight_scale.shape[0] * UNIT // (weight.shape[1] * 4)
    return LeftWeight(weight, weight_scale.view(torch.int32), form_of_int4(weight_scale.dtype, per_unit))


def launch(args: Any) -> torch.Tensor:
    dtype = torch.float32 if args.out_float32 else args.x.dtype
    if args.prefill:
        return launch_prefill(args.x, values_of(args.weight, args.weight_scale), dtype)
    return launch_left_product(args.x, left_weight(args.weight, args.weight_scale), 1, dtype)[0]


def launch_linear_w4a16_silu_mul(args: Any) -> torch.Tensor:
    weight = left_weight(args.weight, args.weight_scale)
    return launch_left_product(args.x, weight, 1, args.x.dtype, gated=True)[0]


def launch_linear_w4a16_partials(args: Any) -> torch.Tensor:
    x = args.x
    k, whole = x.shape[1], args.whole_k or x.shape[1]
    is_rounded = is_sum(k, args.count, whole) and not args.stacked
    dtype = x.dtype if is_rounded else torch.float32
    if args.prefill:
        sums = launch_prefill(x, values_of(args.weight, args.weight_scale), dtype)
        return sums if args.stacked else sums[None]
    weight = left_weight(args.weight, args.weight_scale)
    partials = launch_left_partials(x, weight, count_k_splits(whole) * k // whole, args.count, dtype)
    return partials.flatten(0, 1) if args.stacked else partials


def values_of(weight: torch.Tensor, weight_scale: torch.Tensor) -> torch.Tensor:
    """The values [N, K] of a weight, rounded once to bfloat16."""
    n, units = weight.shape[0], weight.shape[1] * 4 // UNIT
    out = torch.empty((n, units * UNIT), dtype=torch.bfloat16, device=weight.device)
    w4a16_values_kernel[(triton.cdiv(n, VALUE_ROWS), units)](
        weight,
        weight_scale,
        out,
        n,
        BN=VALUE_ROWS,
        PER_UNIT=weight_scale.shape[0] // units,
        ON_DEVICE=weight.is_cuda,
        num_warps=4,
    )
    return out
