"""x @ weight.T with a weight of scaled codes, which is decoded in the registers that the tensor cores read.

A step takes one unit of 128 columns (ops.blocks): parts of 16 or 32 neighbouring columns are decoded to
bfloat16 values, whose products are added to the total in the tensor core one after the other. That order
holds for every tile, so rows have the same bits in all of them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_mtp.ops.blocks import KINDS, UNIT
from compiled_mtp.ops.device import device_of
from compiled_mtp.ops.k_splits import count_k_splits
from compiled_mtp.ops.linear_blocks.config import BlocksConfig, configuration
from compiled_mtp.ops.linear_blocks.decode_kernel import MAGIC, decode_part, load_codes, load_fields
from compiled_mtp.ops.prefill_triton import launch_prefill

OPTIONS = {"enable_fp_fusion": True}
# Weight rows of a program that multiplies a weight out.
VALUE_ROWS = 32
# Rows of a program that decodes some rows.
SOME_ROWS = 4


@triton.jit
def sum_k_splits(
    x_at,
    x_step,
    unit_at,
    row_in_block,
    fields_at,
    fields_step,
    factor,
    units,
    magic,
    row,
    rows,
    first,
    BM: tl.constexpr,
    BN: tl.constexpr,
    ROW_TILES: tl.constexpr,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    FIELDS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    K_SPLITS: tl.constexpr,
):
    """The sums of K_SPLITS neighbouring K splits of `units` units each, from `first` on, added as a tree: one
    tile [BM, BN] for each of ROW_TILES."""
    if K_SPLITS == 1:
        totals = ()
        for _ in tl.static_range(ROW_TILES):
            totals += (tl.zeros((BM, BN), tl.float32),)
        x_at += first * units * 128
        unit_at += first * units * BLOCK_WORDS
        fields_at += first * units * fields_step
        for _ in range(units):
            codes = load_codes(unit_at, row_in_block, WIDTH, KIND)
            fields = load_fields(fields_at, row_in_block, FIELDS)
            for part in tl.static_range(128 // WIDTH):
                values = decode_part(codes, fields, row_in_block, magic, part, WIDTH, KIND)
                grown = ()
                for tile in tl.static_range(ROW_TILES):
                    inside = (row + tile * BM < rows)[:, None]
                    x = tl.load(x_at + tile * x_step + part * WIDTH, mask=inside, other=0.0)
                    grown += (tl.dot(x, values, totals[tile]),)
                totals = grown
            x_at += 128
            unit_at += BLOCK_WORDS
            fields_at += fields_step
        if KIND == "NVFP4":
            scaled = ()
            for tile in tl.static_range(ROW_TILES):
                # A plain product would be contracted with the sum of two K splits in one program.
                zeros = tl.zeros_like(totals[tile])
                scaled += (tl.fma(totals[tile], zeros + factor[None, :], zeros),)
            totals = scaled
        return totals
    else:
        half: tl.constexpr = K_SPLITS // 2
        left = sum_k_splits(
            x_at,
            x_step,
            unit_at,
            row_in_block,
            fields_at,
            fields_step,
            factor,
            units,
            magic,
            row,
            rows,
            first,
            BM,
            BN,
            ROW_TILES,
            KIND,
            WIDTH,
            FIELDS,
            BLOCK_WORDS,
            half,
        )
        right = sum_k_splits(
            x_at,
            x_step,
            unit_at,
            row_in_block,
            fields_at,
            fields_step,
            factor,
            units,
            magic,
            row,
            rows,
            first + half,
            BM,
            BN,
            ROW_TILES,
            KIND,
            WIDTH,
            FIELDS,
            BLOCK_WORDS,
            half,
        )
        totals = ()
        for tile in tl.static_range(ROW_TILES):
            totals += (left[tile] + right[tile],)
        return totals


@triton.jit
def factor_of(last_unit_at, row, KIND: tl.constexpr):
    """The float32 factors [BN] of rows, in the unit behind the last; zeros for kinds without any."""
    if KIND == "NVFP4":
        return tl.load(last_unit_at + row).to(tl.float32, bitcast=True)
    else:
        return tl.zeros(row.shape, tl.float32)


# Triton would compile other kernels for a value of 1 and for multiples of 16.
@triton.jit(do_not_specialize=["rows", "units", "all_units"])
def blocks_kernel(
    x,
    weight,
    weight_scale,
    out,
    rows,
    n,
    x_stride,
    weight_stride,
    units,
    all_units,
    magic,
    BM: tl.constexpr,
    BN: tl.constexpr,
    ROW_TILES: tl.constexpr,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    FIELDS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    K_SPLITS: tl.constexpr,
    GATED: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """One tile [ROW_TILES * BM rows, BN weight rows] over K_SPLITS neighbouring K splits of `units` units.

    all_units: units of a whole row.
    """
    # Row tiles of one weight tile are neighbours, so that all but the first find it in L2.
    row_tiles = tl.cdiv(rows, BM * ROW_TILES)
    tile = tl.program_id(0)
    row = (tile % row_tiles) * (BM * ROW_TILES) + tl.arange(0, BM)
    first_column = (tile // row_tiles) * BN
    in_tile = tl.arange(0, BN)
    column = first_column + in_tile
    # Weight rows beyond N, which has a multiple of 16, are read as the first ones and never stored.
    if GATED:
        # By turns eight weight rows of the gate and their partners: a thread of the product holds both, and
        # scales are read eight together.
        half = first_column // 2 + in_tile // 16 * 8 + in_tile % 8
        weight_row = tl.where(half < n // 2, half, in_tile % 8) + n // 2 * (in_tile // 8 % 2)
        weight_row = tl.max_contiguous(tl.multiple_of(weight_row, 8), 8)
    else:
        weight_row = tl.where(column < n, column, in_tile % 16)
        weight_row = tl.max_contiguous(tl.multiple_of(weight_row, 16), 16)
    partial = tl.program_id(1)
    first_unit = partial * K_SPLITS * units
    row_in_block = weight_row % 16
    unit_at = weight + (weight_row // 16).to(tl.int64) * (16 * weight_stride) + first_unit * BLOCK_WORDS
    if PDL:
        if PREFETCH > 0:
            tl.inline_asm_elementwise(
                "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
                "=r,l,r",
                [
                    (unit_at + row_in_block * 32).to(tl.uint64, bitcast=True),
                    tl.full((BN,), PREFETCH, tl.int32),
                ],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
        gdc_wait()
        # The next kernel may come only now: measured for `linear`, two kernels that wait crowd a third.
        gdc_launch_dependents()
    fields_at = weight_scale.to(tl.pointer_type(tl.int32)) + weight_row // 16 * (8 * FIELDS)
    fields_step = n // 2 * FIELDS
    totals = sum_k_splits(
        x + row.to(tl.int64)[:, None] * x_stride + (first_unit * 128 + tl.arange(0, WIDTH))[None, :],
        BM * x_stride,
        unit_at,
        row_in_block,
        fields_at + first_unit * fields_step,
        fields_step,
        factor_of(fields_at + all_units * fields_step, row_in_block, KIND),
        units,
        magic,
        row,
        rows,
        0,
        BM,
        BN,
        ROW_TILES,
        KIND,
        WIDTH,
        FIELDS,
        BLOCK_WORDS,
        K_SPLITS,
    )
    for index in tl.static_range(ROW_TILES):
        total = totals[index]
        own = row + index * BM
        if GATED:
            # Rounded as silu_mul does it on the rounded sums.
            pairs = tl.reshape(total.to(out.dtype.element_ty).to(tl.float32), (BM, BN // 16, 2, 8))
            gate, up = tl.split(tl.reshape(tl.permute(pairs, (0, 1, 3, 2)), (BM, BN // 2, 2)))
            total = gate / (1.0 + tl.exp(-gate)) * up
            width = n // 2
            to_column = first_column // 2 + tl.arange(0, BN // 2)
        else:
            width = n
            to_column = column
        to = out + (partial.to(tl.int64) * rows + own.to(tl.int64))[:, None] * width + to_column[None, :]
        is_inside = (own < rows)[:, None] & (to_column < width)[None, :]
        tl.store(to, total.to(out.dtype.element_ty), mask=is_inside)


@triton.jit(do_not_specialize=["rows"])
def block_rows_kernel(
    ids,
    weight,
    weight_scale,
    out,
    rows,
    n,
    magic,
    BN: tl.constexpr,
    HAS_IDS: tl.constexpr,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    FIELDS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
):
    """The values of BN weight rows in one unit, rounded to bfloat16: of those that `ids` names, or of all."""
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    unit, units = tl.program_id(1), tl.num_programs(1)
    inside = row < rows
    if HAS_IDS:
        own = tl.load(ids + row, mask=inside, other=0)
    else:
        own = tl.where(inside, row, tl.arange(0, BN) % 16)
    unit_at = weight + ((own // 16).to(tl.int64) * units + unit) * BLOCK_WORDS
    in_block = (own % 16).to(tl.int32)
    codes = load_codes(unit_at, in_block, WIDTH, KIND)
    step = n // 2 * FIELDS
    fields_at = weight_scale.to(tl.pointer_type(tl.int32)) + own // 16 * (8 * FIELDS)
    fields = load_fields(fields_at + unit.to(tl.int64) * step, in_block, FIELDS)
    factor = factor_of(fields_at + units.to(tl.int64) * step, in_block, KIND)
    to = out + (row.to(tl.int64) * units + unit)[None, :] * 128 + tl.arange(0, WIDTH)[:, None]
    for part in tl.static_range(128 // WIDTH):
        values = decode_part(codes, fields, in_block, magic, part, WIDTH, KIND)
        if KIND == "NVFP4":
            values = (values.to(tl.float32) * factor[None, :]).to(tl.bfloat16)
        tl.store(to + part * WIDTH, values, mask=inside[None, :])


def launch(args: Any) -> torch.Tensor:
    dtype = torch.float32 if args.out_float32 else args.x.dtype
    if args.prefill:
        return launch_prefill(args.x, values_of(args.weight, args.weight_scale, args.kind), dtype)
    return launch_product(args.x, args.weight, args.weight_scale, args.kind, 1, 1, dtype)[0]


def launch_linear_blocks_silu_mul(args: Any) -> torch.Tensor:
    weights = (args.weight, args.weight_scale, args.kind)
    return launch_product(args.x, *weights, 1, 1, args.x.dtype, gated=True)[0]


def launch_linear_blocks_partials(args: Any) -> torch.Tensor:
    x, weights = args.x, (args.weight, args.weight_scale, args.kind)
    k, whole = x.shape[1], args.whole_k or x.shape[1]
    is_sum = args.count == 1 and k == whole
    dtype = x.dtype if is_sum and not args.stacked else torch.float32
    if args.prefill:
        sums = launch_prefill(x, values_of(*weights), dtype)
        return sums if args.stacked else sums[None]
    partials = launch_product(x, *weights, args.count, count_k_splits(whole) * k // whole, dtype)
    return partials.flatten(0, 1) if args.stacked else partials


def launch_block_rows(args: Any) -> torch.Tensor:
    return decode_rows(args.ids, args.weight, args.weight_scale, args.kind)


def values_of(weight: torch.Tensor, weight_scale: torch.Tensor, kind: str) -> torch.Tensor:
    """The values [N, K] of a weight, rounded to bfloat16, with the factors of rows in them."""
    return decode_rows(None, weight, weight_scale, kind)


def decode_rows(
    ids: torch.Tensor | None, weight: torch.Tensor, weight_scale: torch.Tensor, kind: str
) -> torch.Tensor:
    """The values of the rows `ids`, None for all."""
    form, n = KINDS[kind], weight.shape[0]
    rows = n if ids is None else ids.shape[0]
    k = form.columns(weight.shape[1])
    out = torch.empty((rows, k), dtype=torch.bfloat16, device=weight.device)
    if rows == 0:
        return out
    # Any number of rows has the same programs' size: one kernel for every batch.
    block = VALUE_ROWS if ids is None else SOME_ROWS
    block_rows_kernel[(triton.cdiv(rows, block), k // UNIT)](
        weight if ids is None else ids,
        weight,
        weight_scale,
        out,
        rows,
        n,
        MAGIC,
        BN=block,
        HAS_IDS=ids is not None,
        KIND=kind,
        WIDTH=form.width,
        FIELDS=form.fields,
        BLOCK_WORDS=16 * form.words,
        num_warps=4 if ids is None else 1,
    )
    return out


def launch_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    kind: str,
    split: int,
    k_splits: int,
    dtype: torch.dtype,
    gated: bool = False,
) -> torch.Tensor:
    """[split, M, N] of K in `k_splits` K splits, or [1, M, N / 2] where gated."""
    device = device_of(x.device.index)
    config = configuration(x.shape[0], weight.shape[0], split, device.shared_bytes, KINDS[kind])
    return launch_config(config, x, weight, weight_scale, kind, split, k_splits, dtype, gated)


def launch_config(
    config: BlocksConfig,
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    kind: str,
    split: int,
    k_splits: int,
    dtype: torch.dtype,
    gated: bool = False,
) -> torch.Tensor:
    """The product with a configuration given, as a tuner does."""
    (rows, k), n, form = x.shape, weight.shape[0], KINDS[kind]
    out = torch.empty((split, rows, n // 2 if gated else n), dtype=dtype, device=x.device)
    if rows == 0 or n == 0:
        return out
    has_pdl = device_of(x.device.index).has_dependent_launch
    units = k // UNIT
    blocks_kernel[(triton.cdiv(rows, config.rows) * triton.cdiv(n, config.block_n), split)](
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
        units,
        MAGIC,
        BM=config.block_m,
        BN=config.block_n,
        ROW_TILES=config.row_tiles,
        KIND=kind,
        WIDTH=form.width,
        FIELDS=form.fields,
        BLOCK_WORDS=16 * form.words,
        K_SPLITS=k_splits // split,
        GATED=gated,
        PREFETCH=min(config.prefetch_bytes, units // split * 64),
        PDL=has_pdl,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        launch_pdl=has_pdl,
        **OPTIONS,
    )
    return out
