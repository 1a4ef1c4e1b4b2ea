"""Launches of the four-bit products: few rows in product_kernel.py, a prompt's rows by the weight's values."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from compiled_mtp.ops.int4 import UNIT
from compiled_mtp.ops.k_splits import count_k_splits
from compiled_mtp.ops.linear_w4a16.product_kernel import launch_product
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
):
    """The values of BN weight rows in one unit, rounded to bfloat16."""
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    unit, units = tl.program_id(1), tl.num_programs(1)
    inside = row < n
    word = tl.arange(0, 32)
    words_at = weight + ((row // 16).to(tl.int64) * units + unit)[:, None] * 512
    words_at += (row % 16 * 16)[:, None] + (word // 16 * 256 + word % 16)[None, :]
    words = tl.load(words_at, mask=inside[:, None], other=0).to(tl.int32)
    to = out + (row.to(tl.int64) * units + unit)[:, None] * 128 + word[None, :]
    for index in tl.static_range(4):
        group_at = weight_scale + ((unit * PER_UNIT + index * PER_UNIT // 4) * n + row) * 2
        scale = tl.load(group_at, mask=inside, other=0.0).to(tl.float32)
        # The bfloat16 number -(128 + z) has z in its lowest bits.
        minus = tl.load(group_at + 1, mask=inside, other=0.0).to(tl.int16, bitcast=True).to(tl.int32)
        code = (words >> 4 * index) & 15
        values = (code - (minus & 127)[:, None]).to(tl.float32) * scale[:, None]
        tl.store(to + index * 32, values.to(tl.bfloat16), mask=inside[:, None])


def launch(args: Any) -> torch.Tensor:
    dtype = torch.float32 if args.out_float32 else args.x.dtype
    if args.prefill:
        return launch_prefill(args.x, values_of(args.weight, args.weight_scale), dtype)
    return launch_product(args.x, args.weight, args.weight_scale, 1, 1, dtype)[0]


def launch_linear_w4a16_silu_mul(args: Any) -> torch.Tensor:
    return launch_product(args.x, args.weight, args.weight_scale, 1, 1, args.x.dtype, gated=True)[0]


def launch_linear_w4a16_partials(args: Any) -> torch.Tensor:
    x, weight, scale = args.x, args.weight, args.weight_scale
    k, whole = x.shape[1], args.whole_k or x.shape[1]
    is_sum = args.count == 1 and k == whole
    dtype = x.dtype if is_sum and not args.stacked else torch.float32
    if args.prefill:
        sums = launch_prefill(x, values_of(weight, scale), dtype)
        return sums if args.stacked else sums[None]
    partials = launch_product(x, weight, scale, args.count, count_k_splits(whole) * k // whole, dtype)
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
        num_warps=4,
    )
    return out
