"""x @ weight.T with a four-bit weight, which is decoded in the registers that the tensor cores read.

A step takes one unit of 128 columns (ops.int4): each bit field of its 32 words is 32 neighbouring columns,
decoded to exact q - z. The products of a group's columns are summed in a tensor core, multiplied by the scale
in float32 and added to the total. That order holds for every tile, so rows have the same bits in all of them.
A prompt's rows are multiplied by the weight's values, rounded to bfloat16.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_mtp.ops.device import device_of
from compiled_mtp.ops.int4 import UNIT
from compiled_mtp.ops.int4_triton import add_unit, decode, load_unit, minus_of, scale_of
from compiled_mtp.ops.k_splits import NARROW_ROWS, count_k_splits
from compiled_mtp.ops.linear_w4a16.config import W4A16Config, configuration, few_rows_tile
from compiled_mtp.ops.linear_w4a16.few_rows_kernel import launch_few_rows
from compiled_mtp.ops.prefill_triton import launch_prefill

OPTIONS = {"enable_fp_fusion": True}
# Weight rows of a program that multiplies a weight out.
VALUE_ROWS = 32


@triton.jit
def sum_k_splits(
    x_at,
    x_step,
    weight_at,
    group_at,
    n,
    units,
    row,
    rows,
    first,
    BM: tl.constexpr,
    BN: tl.constexpr,
    ROW_TILES: tl.constexpr,
    PER_UNIT: tl.constexpr,
    SCALE: tl.constexpr,
    K_SPLITS: tl.constexpr,
    ON_DEVICE: tl.constexpr,
):
    """The sums of K_SPLITS neighbouring K splits of `units` units each, from `first` on, added as a tree: one
    tile [BM, BN] for each of ROW_TILES."""
    if K_SPLITS == 1:
        totals = ()
        for _ in tl.static_range(ROW_TILES):
            totals += (tl.zeros((BM, BN), tl.float32),)
        x_at += first * units * 128
        weight_at += first * units * 512
        group_at += first * units * PER_UNIT * n
        for _ in range(units):
            values, groups = load_unit(weight_at, group_at, n, PER_UNIT, ON_DEVICE)
            grown = ()
            for tile in tl.static_range(ROW_TILES):
                inside = (row + tile * BM < rows)[:, None]
                grown += (
                    add_unit(x_at + tile * x_step, inside, values, groups, totals[tile], PER_UNIT, SCALE),
                )
            totals = grown
            x_at += 128
            weight_at += 512
            group_at += PER_UNIT * n
        return totals
    else:
        half: tl.constexpr = K_SPLITS // 2
        left = sum_k_splits(
            x_at,
            x_step,
            weight_at,
            group_at,
            n,
            units,
            row,
            rows,
            first,
            BM,
            BN,
            ROW_TILES,
            PER_UNIT,
            SCALE,
            half,
            ON_DEVICE,
        )
        right = sum_k_splits(
            x_at,
            x_step,
            weight_at,
            group_at,
            n,
            units,
            row,
            rows,
            first + half,
            BM,
            BN,
            ROW_TILES,
            PER_UNIT,
            SCALE,
            half,
            ON_DEVICE,
        )
        totals = ()
        for tile in tl.static_range(ROW_TILES):
            totals += (left[tile] + right[tile],)
        return totals


# Triton would compile other kernels for a value of 1 and for multiples of 16.
@triton.jit(do_not_specialize=["rows", "units"])
def w4a16_kernel(
    x,
    weight,
    weight_scale,
    out,
    rows,
    n,
    x_stride,
    weight_stride,
    units,
    BM: tl.constexpr,
    BN: tl.constexpr,
    ROW_TILES: tl.constexpr,
    PER_UNIT: tl.constexpr,
    K_SPLITS: tl.constexpr,
    GATED: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
    ON_DEVICE: tl.constexpr,
):
    """One tile [ROW_TILES * BM rows, BN weight rows] over K_SPLITS neighbouring K splits of `units` units."""
    # Row tiles of one weight tile are neighbours, so that all but the first find it in L2.
    row_tiles = tl.cdiv(rows, BM * ROW_TILES)
    tile = tl.program_id(0)
    row = (tile % row_tiles) * (BM * ROW_TILES) + tl.arange(0, BM)
    first_column = (tile // row_tiles) * BN
    in_tile = tl.arange(0, BN)
    column = first_column + in_tile
    if GATED:
        # By turns a weight row of the gate and its partner, so that a thread of the product holds both.
        half = tl.minimum(first_column // 2 + in_tile // 2, n // 2 - 1)
        weight_row = half + n // 2 * (in_tile % 2)
    else:
        # Weight rows beyond N, which has a multiple of 16, are read as the first ones and never stored.
        weight_row = tl.where(column < n, column, in_tile % 16)
        weight_row = tl.max_contiguous(tl.multiple_of(weight_row, 16), 16)
    partial = tl.program_id(1)
    first_unit = partial * K_SPLITS * units
    words_at = weight + (weight_row // 16).to(tl.int64) * (16 * weight_stride)
    words_at += weight_row % 16 * 32 + first_unit * 512
    if PDL:
        if PREFETCH > 0:
            tl.inline_asm_elementwise(
                "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
                "=r,l,r",
                [
                    words_at.to(tl.uint64, bitcast=True),
                    tl.full((BN,), PREFETCH, tl.int32),
                ],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
        gdc_wait()
        # The next kernel may come only now: measured for `linear`, two kernels that wait crowd a third.
        gdc_launch_dependents()
    group_at = weight_scale.to(tl.pointer_type(tl.int32)) + first_unit * PER_UNIT * n + weight_row
    totals = sum_k_splits(
        x + row.to(tl.int64)[:, None] * x_stride + (first_unit * 128 + tl.arange(0, 32))[None, :],
        BM * x_stride,
        words_at[None, :] + tl.arange(0, 32)[:, None],
        group_at,
        n,
        units,
        row,
        rows,
        0,
        BM,
        BN,
        ROW_TILES,
        PER_UNIT,
        weight_scale.dtype.element_ty,
        K_SPLITS,
        ON_DEVICE,
    )
    for index in tl.static_range(ROW_TILES):
        total = totals[index]
        own = row + index * BM
        if GATED:
            # Rounded as silu_mul does it on the rounded sums.
            gate, up = tl.split(tl.reshape(total.to(out.dtype.element_ty).to(tl.float32), (BM, BN // 2, 2)))
            total = gate / (1.0 + tl.exp(-gate)) * up
            width = n // 2
            to_column = first_column // 2 + tl.arange(0, BN // 2)
        else:
            width = n
            to_column = column
        to = out + (partial.to(tl.int64) * rows + own.to(tl.int64))[:, None] * width + to_column[None, :]
        is_inside = (own < rows)[:, None] & (to_column < width)[None, :]
        tl.store(to, total.to(out.dtype.element_ty), mask=is_inside)


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
        ON_DEVICE=weight.is_cuda,
        num_warps=4,
    )
    return out


def launch_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    split: int,
    k_splits: int,
    dtype: torch.dtype,
    gated: bool = False,
) -> torch.Tensor:
    """[split, M, N] of K in `k_splits` K splits, or [1, M, N / 2] where gated."""
    n = weight.shape[0]
    if x.is_cuda and x.shape[0] <= NARROW_ROWS and split == k_splits and not (gated and n % 32):
        tile = few_rows_tile(x.shape[0], n, split, gated)
        return launch_few_rows(tile, x, weight, weight_scale, k_splits, dtype, gated)
    device = device_of(x.device.index)
    config = configuration(x.shape[0], weight.shape[0], split, device.shared_bytes)
    return launch_config(config, x, weight, weight_scale, split, k_splits, dtype, gated)


def launch_config(
    config: W4A16Config,
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    split: int,
    k_splits: int,
    dtype: torch.dtype,
    gated: bool = False,
) -> torch.Tensor:
    """The product with a configuration given, as the tuner does."""
    (rows, k), n = x.shape, weight.shape[0]
    out = torch.empty((split, rows, n // 2 if gated else n), dtype=dtype, device=x.device)
    if rows == 0 or n == 0:
        return out
    has_pdl = device_of(x.device.index).has_dependent_launch
    units = k // UNIT
    w4a16_kernel[(triton.cdiv(rows, config.rows) * triton.cdiv(n, config.block_n), split)](
        x,
        weight,
        weight_scale,
        out,
        rows,
        n,
        # One row may have any stride; another value would compile another kernel.
        x.stride(0) if rows > 1 else k,
        weight.stride(0),
        units // k_splits,
        BM=config.block_m,
        BN=config.block_n,
        ROW_TILES=config.row_tiles,
        PER_UNIT=weight_scale.shape[0] // units,
        K_SPLITS=k_splits // split,
        GATED=gated,
        PREFETCH=min(config.prefetch_bytes, units // split * 64),
        PDL=has_pdl,
        ON_DEVICE=x.is_cuda,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        launch_pdl=has_pdl,
        **OPTIONS,
    )
    return out
