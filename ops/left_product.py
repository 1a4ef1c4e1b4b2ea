"""x @ weight.T with a weight in codes, decoded in the registers of the left operand (ops.left_operand).

A step takes one unit of 128 columns, in parts of neighbouring columns that share a scale. Values are
multiplied and added to the total in the tensor core, part after part. Where a kind scales sums, the tensor
core sums the products of the numbers q of a scale's columns alone; the sum times the scale is added to the
total in float32. That order holds for every tile and for `left_large_m`, so rows have the same bits in all.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_mtp.ops.device import device_of
from compiled_mtp.ops.left_config import LeftTile
from compiled_mtp.ops.left_decode import decode_part, finish, load_codes
from compiled_mtp.ops.left_operand import (
    LeftWeight,
    copy_layout,
    copy_rows,
    copy_words,
    memory_layout,
    spread,
    store_tile,
    weight_row,
    words_above,
    words_of_rows,
)
from compiled_mtp.ops.left_scales import fields_of, load_fields, own_fields, scale_of, words_of_scales

OPTIONS = {"enable_fp_fusion": True}
UNIT = 128


@gluon.jit
def add_unit(
    words, above, x, fields, row, total, layout: gl.constexpr, UNIT: gl.constexpr, WIDTH: gl.constexpr,
    FIELDS: gl.constexpr, KIND: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """total [BN, BM] plus the products of unit UNIT of a chunk in shared memory, part by part.

    fields: those of the unit, as `load_fields` returns them.
    """
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, layout, 2)
    codes = load_codes(words, above, row, UNIT, WIDTH, KIND, left)
    fields = own_fields(fields, row, FIELDS, KIND)
    product = total
    for part in gl.static_range(128 // WIDTH):
        columns = x.slice(UNIT * 128 + part * WIDTH, WIDTH, 1).permute([1, 0]).load(right)
        decoded = decode_part(codes, fields, part, WIDTH, KIND)
        if PARTS == 0:
            total = mma_v2(decoded, columns, total, input_precision="ieee")
        else:
            if part % PARTS == 0:
                product = gl.zeros([total.shape[0], total.shape[1]], gl.float32, layout)
            product = mma_v2(decoded, columns, product, input_precision="ieee")
            if part % PARTS == PARTS - 1:
                scale = scale_of(fields, part * WIDTH // 32, part * WIDTH % 32 // 16, KIND)
                scale = gl.convert_layout(scale, gl.SliceLayout(1, layout), assert_trivial=True)
                total = gl.fma(product, spread(scale, total), total)
    return total


@gluon.jit
def sum_units(
    words, above, x, words_at, above_at, x_at, is_row, fields_at, row, step, first, units, fields, total,
    layout: gl.constexpr, words_layout: gl.constexpr, above_layout: gl.constexpr, rows_layout: gl.constexpr,
    CHUNK: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr, EVEN: gl.constexpr, WIDTH: gl.constexpr,
    FIELDS: gl.constexpr, ABOVE: gl.constexpr, BLOCK_WORDS: gl.constexpr, KIND: gl.constexpr,
    PARTS: gl.constexpr,
):  # fmt: skip
    """Add `units` units from `first` on to total, chunk by chunk.

    The first STAGES - 1 chunks are on their way to shared memory; fields: those of the first AHEAD chunks.
    """
    PER_UNIT: gl.constexpr = words_of_scales(KIND, FIELDS)
    PER_CHUNK: gl.constexpr = CHUNK * PER_UNIT
    end = first + units
    stage = 0
    for begin in range(0, units, CHUNK):
        later = first + begin + AHEAD * CHUNK
        fields += load_fields(fields_at, row, step, later, end - 1, CHUNK, FIELDS, KIND)
        async_copy.wait_group(STAGES - 2)
        # All warps have left the stage of the chunk before this one.
        free = (stage + STAGES - 1) % STAGES
        next_first = first + begin + (STAGES - 1) * CHUNK
        copy_words(words.index(free), words_at, next_first, end, words_layout, 32, BLOCK_WORDS)
        if ABOVE > 0:
            copy_words(above.index(free), above_at, next_first, end, above_layout, ABOVE, BLOCK_WORDS)
        copy_rows(x.index(free), x_at, is_row, next_first, end, rows_layout)
        own_words = words.index(stage)
        own_above = above.index(stage)
        own_x = x.index(stage)
        for unit in gl.static_range(CHUNK):
            own = fields[unit * PER_UNIT : (unit + 1) * PER_UNIT]
            if EVEN or unit == 0:
                total = add_unit(
                    own_words, own_above, own_x, own, row, total, layout, unit, WIDTH, FIELDS, KIND, PARTS
                )
            else:
                if begin + unit < units:
                    total = add_unit(
                        own_words, own_above, own_x, own, row, total, layout, unit, WIDTH, FIELDS, KIND, PARTS
                    )
        stage = (stage + 1) % STAGES
        fields = fields[PER_CHUNK:]
    return total


# Triton would compile other kernels for a value of 1 and for multiples of 16.
@gluon.jit(do_not_specialize=["rows", "n", "units", "all_units"])
def left_kernel(
    x, weight, weight_scale, out, rows, n, x_stride, weight_stride, units, all_units,
    BM: gl.constexpr, BN: gl.constexpr, CHUNK: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr,
    EVEN: gl.constexpr, KIND: gl.constexpr, WIDTH: gl.constexpr, FIELDS: gl.constexpr, ABOVE: gl.constexpr,
    BLOCK_WORDS: gl.constexpr, PARTS: gl.constexpr, GATED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """BM rows by a tile of BN weight rows, over one K split of `units` units.

    all_units: units of a whole row. weight_scale: words of 32 bits. KIND to PARTS: the weight's LeftForm.
    EVEN: `units` is a multiple of CHUNK. GATED: as `weight_row` has it.
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [gl.num_warps(), 1], [16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    words_layout: gl.constexpr = copy_layout(CHUNK * 32, gl.num_warps())
    above_layout: gl.constexpr = copy_layout(CHUNK * (ABOVE if ABOVE > 0 else 32), gl.num_warps())
    rows_layout: gl.constexpr = copy_layout(CHUNK * 128, gl.num_warps())
    # Row tiles of one weight tile are neighbours, so that all but the first find it in L2.
    row_tiles = (rows + BM - 1) // BM
    tile = gl.program_id(0) // row_tiles
    first_row = gl.program_id(0) % row_tiles * BM
    partial = gl.program_id(1)
    first = partial * units
    end = first + units
    words = gl.allocate_shared_memory(gl.int16, [STAGES, BN, CHUNK * 32], memory_layout(CHUNK * 32))
    shared_x = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BM, CHUNK * 128], memory_layout(CHUNK * 128))
    own_row = weight_row(tile, n, gl.arange(0, BN, gl.SliceLayout(1, words_layout)), BN, GATED)
    word = gl.arange(0, CHUNK * 32, gl.SliceLayout(0, words_layout))
    words_at = words_of_rows(weight, own_row, weight_stride, word, 32, BLOCK_WORDS)
    above = words
    above_at = words_at
    if ABOVE > 0:
        above = gl.allocate_shared_memory(gl.int16, [STAGES, BN, CHUNK * ABOVE], memory_layout(CHUNK * ABOVE))
        own_row = weight_row(tile, n, gl.arange(0, BN, gl.SliceLayout(1, above_layout)), BN, GATED)
        word = gl.arange(0, CHUNK * ABOVE, gl.SliceLayout(0, above_layout))
        above_at = words_above(weight, own_row, weight_stride, word, ABOVE, BLOCK_WORDS, KIND)
    for chunk in gl.static_range(STAGES - 1):
        copy_words(words.index(chunk), words_at, first + chunk * CHUNK, end, words_layout, 32, BLOCK_WORDS)
        if ABOVE > 0:
            copy_words(
                above.index(chunk), above_at, first + chunk * CHUNK, end, above_layout, ABOVE, BLOCK_WORDS
            )
    own_row = weight_row(tile, n, gl.arange(0, BN, gl.SliceLayout(1, left)), BN, GATED)
    in_block = own_row % 16
    fields_at, step = fields_of(weight_scale, own_row, n, FIELDS, KIND)
    fields = load_fields(fields_at, in_block, step, first, end - 1, AHEAD * CHUNK, FIELDS, KIND)
    if PDL:
        gdc_wait()
        # The next kernel may come only now: measured for `linear`, two kernels that wait crowd a third.
        gdc_launch_dependents()
    row = first_row + gl.arange(0, BM, gl.SliceLayout(1, rows_layout))
    column = gl.arange(0, CHUNK * 128, gl.SliceLayout(0, rows_layout))
    x_at = x + row.to(gl.int64)[:, None] * x_stride + column[None, :]
    for chunk in gl.static_range(STAGES - 1):
        copy_rows(shared_x.index(chunk), x_at, row < rows, first + chunk * CHUNK, end, rows_layout)
    total = sum_units(
        words, above, shared_x, words_at, above_at, x_at, row < rows, fields_at, in_block, step, first,
        units, fields, gl.zeros([BN, BM], gl.float32, layout), layout, words_layout, above_layout,
        rows_layout, CHUNK, STAGES, AHEAD, EVEN, WIDTH, FIELDS, ABOVE, BLOCK_WORDS, KIND, PARTS,
    )  # fmt: skip
    async_copy.wait_group(0)
    total = finish(total, weight_scale, tile, n, all_units, layout, BN, FIELDS, KIND, GATED)
    store_tile(total, out, tile, first_row, partial, rows, n, layout, BN, BM, GATED)


def launch_left(
    tile: LeftTile,
    x: torch.Tensor,
    weight: LeftWeight,
    k_splits: int,
    dtype: torch.dtype,
    gated: bool = False,
) -> torch.Tensor:
    """[k_splits, M, N] of K in `k_splits` K splits, or [1, M, N / 2] where gated."""
    (rows, k), n = x.shape, weight.words.shape[0]
    out = torch.empty((k_splits, rows, n // 2 if gated else n), dtype=dtype, device=x.device)
    if rows == 0 or n == 0:
        return out
    has_pdl = device_of(x.device.index).has_dependent_launch
    units = k // UNIT
    left_kernel[(triton.cdiv(rows, tile.block_m) * triton.cdiv(n, tile.block_n), k_splits)](
        x,
        weight.words,
        weight.scales,
        out,
        rows,
        n,
        # One row may have any stride; another value would compile another kernel.
        x.stride(0) if rows > 1 else k,
        weight.words.stride(0),
        units // k_splits,
        units,
        BM=tile.block_m,
        BN=tile.block_n,
        CHUNK=tile.chunk,
        STAGES=tile.num_stages,
        AHEAD=tile.ahead,
        EVEN=units // k_splits % tile.chunk == 0,
        **weight.form.constants(),
        GATED=gated,
        PDL=has_pdl,
        num_warps=tile.num_warps,
        launch_pdl=has_pdl,
        **OPTIONS,
    )
    return out
