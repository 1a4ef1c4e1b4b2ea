"""x @ weight.T with a weight in codes, decoded in the registers of the left operand (ops.left_operand).

A step takes one unit of 128 columns, in parts of neighbouring columns that share a scale. Values are
multiplied and added to the total in the tensor core, part after part. Where a kind scales sums, the tensor
core sums the products of the numbers q of a scale's columns alone; the sum times the scale is added to the
total in float32. That order holds for every tile and for `left_large_m`, so rows have the same bits in all.

A program decodes the scales of a chunk of units once (ops.left_kept_scales). In experts in codes, each thread
decodes those of its rows.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_mtp.ops.counters import zero_counters
from compiled_mtp.ops.device import device_of
from compiled_mtp.ops.left_config import LeftTile
from compiled_mtp.ops.left_decode import decode_part, finish, load_codes
from compiled_mtp.ops.left_kept_scales import (
    count_numbers,
    keep_scales,
    kept_memory,
    kept_scales,
    load_chunk_fields,
    part_scales,
    scales_from,
    sum_scale,
)
from compiled_mtp.ops.left_operand import (
    LeftWeight,
    async_load,
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
from compiled_mtp.ops.left_scales import own_fields, words_of_scales
from compiled_mtp.ops.persistent_slots import await_flag, set_flag

OPTIONS = {"enable_fp_fusion": True}
UNIT = 128


@gluon.jit
def add_unit(
    words, above, x, scales, row, total, layout: gl.constexpr, UNIT: gl.constexpr, WIDTH: gl.constexpr,
    FIELDS: gl.constexpr, KIND: gl.constexpr, PARTS: gl.constexpr, KEPT: gl.constexpr = False,
):  # fmt: skip
    """total [BN, BM] plus the products of unit UNIT of a chunk in shared memory, part by part.

    scales: those of the unit, as `load_fields` returns them or, KEPT, as `kept_scales` does.
    """
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, layout, 2)
    codes = load_codes(words, above, row, UNIT, WIDTH, KIND, left)
    if not KEPT:
        scales = own_fields(scales, row, FIELDS, KIND)
    product = total
    for part in gl.static_range(128 // WIDTH):
        columns = x.slice(UNIT * 128 + part * WIDTH, WIDTH, 1).permute([1, 0]).load(right)
        values = part_scales(scales, part, WIDTH, FIELDS, KIND, KEPT)
        decoded = decode_part(codes, values, part, WIDTH, KIND)
        if PARTS == 0:
            total = mma_v2(decoded, columns, total, input_precision="ieee")
        else:
            if part % PARTS == 0:
                product = gl.zeros([total.shape[0], total.shape[1]], gl.float32, layout)
            product = mma_v2(decoded, columns, product, input_precision="ieee")
            if part % PARTS == PARTS - 1:
                scale = sum_scale(scales, part, WIDTH, FIELDS, KIND, KEPT)
                scale = gl.convert_layout(scale, gl.SliceLayout(1, layout), assert_trivial=True)
                total = gl.fma(product, spread(scale, total), total)
    return total


@gluon.jit
def copy_chunk(
    words, above, x, words_at, above_at, x_at, is_row, first, end, words_layout: gl.constexpr,
    above_layout: gl.constexpr, rows_layout: gl.constexpr, EVEN: gl.constexpr, ABOVE: gl.constexpr,
    BLOCK_WORDS: gl.constexpr,
):  # fmt: skip
    """Copy a chunk from unit `first` on to its stage, if it begins before `end`."""
    if EVEN:
        if first < end:
            async_load(words, words_at + first * BLOCK_WORDS)
            if ABOVE > 0:
                async_load(above, above_at + first * BLOCK_WORDS)
            async_load(x, x_at + first * 128, mask=is_row[:, None])
        async_copy.commit_group()
    else:
        copy_words(words, words_at, first, end, words_layout, 32, BLOCK_WORDS)
        if ABOVE > 0:
            copy_words(above, above_at, first, end, above_layout, ABOVE, BLOCK_WORDS)
        copy_rows(x, x_at, is_row, first, end, rows_layout)


@gluon.jit
def sum_units(
    words, above, x, scales, words_at, above_at, x_at, is_row, fields_from, fields, row, first, units, total,
    layout: gl.constexpr, words_layout: gl.constexpr, above_layout: gl.constexpr, rows_layout: gl.constexpr,
    CHUNK: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr, EVEN: gl.constexpr, WIDTH: gl.constexpr,
    FIELDS: gl.constexpr, ABOVE: gl.constexpr, BLOCK_WORDS: gl.constexpr, KIND: gl.constexpr,
    PARTS: gl.constexpr,
):  # fmt: skip
    """Add `units` units from `first` on to total, chunk by chunk.

    The first STAGES - 1 chunks are on their way to shared memory; fields: those of the first AHEAD chunks, as
    `load_chunk_fields` loads them from `fields_from`. scales: shared memory for those of a chunk. row [BN]:
    the row in its block of 16.
    """
    PER_CHUNK: gl.constexpr = words_of_scales(KIND, FIELDS)
    end = first + units
    stage = 0
    for begin in range(0, units, CHUNK):
        later = first + begin + AHEAD * CHUNK
        fields += load_chunk_fields(fields_from, later, end - 1, FIELDS, KIND)
        async_copy.wait_group(STAGES - 2)
        # All warps have left the stage and the scales of the chunk before this one.
        keep_scales(scales, fields[:PER_CHUNK], fields_from, FIELDS, KIND, PARTS)
        free = (stage + STAGES - 1) % STAGES
        next_first = first + begin + (STAGES - 1) * CHUNK
        copy_chunk(
            words.index(free), above.index(free), x.index(free), words_at, above_at, x_at, is_row, next_first,
            end, words_layout, above_layout, rows_layout, EVEN, ABOVE, BLOCK_WORDS,
        )  # fmt: skip
        own_words = words.index(stage)
        own_above = above.index(stage)
        own_x = x.index(stage)
        for unit in gl.static_range(CHUNK):
            if EVEN or unit == 0:
                numbers = kept_scales(scales, unit, total.shape[0], layout)
                total = add_unit(
                    own_words, own_above, own_x, numbers, row, total, layout, unit, WIDTH, FIELDS, KIND,
                    PARTS, True,
                )  # fmt: skip
            else:
                if begin + unit < units:
                    numbers = kept_scales(scales, unit, total.shape[0], layout)
                    total = add_unit(
                        own_words, own_above, own_x, numbers, row, total, layout, unit, WIDTH, FIELDS, KIND,
                        PARTS, True,
                    )  # fmt: skip
        stage = (stage + 1) % STAGES
        fields = fields[PER_CHUNK:]
    return total


@gluon.jit
def sum_task(
    x, weight, weight_scale, words, above, shared_x, scales, tile, first_row, first, units, rows, n, x_stride,
    weight_stride, total,
    layout: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, CHUNK: gl.constexpr, STAGES: gl.constexpr,
    AHEAD: gl.constexpr, EVEN: gl.constexpr, KIND: gl.constexpr, WIDTH: gl.constexpr, FIELDS: gl.constexpr,
    ABOVE: gl.constexpr, BLOCK_WORDS: gl.constexpr, PARTS: gl.constexpr, GATED: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """total [BN, BM] plus the products of `units` units from `first` on of a tile of weight rows and BM rows.

    words, above, shared_x, scales: shared memory of the program. Others: as `left_kernel` has them.
    """
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    words_layout: gl.constexpr = copy_layout(CHUNK * 32, gl.num_warps())
    above_layout: gl.constexpr = copy_layout(CHUNK * (ABOVE if ABOVE > 0 else 32), gl.num_warps())
    rows_layout: gl.constexpr = copy_layout(CHUNK * 128, gl.num_warps())
    end = first + units
    own_row = weight_row(tile, n, gl.arange(0, BN, gl.SliceLayout(1, words_layout)), BN, GATED)
    word = gl.arange(0, CHUNK * 32, gl.SliceLayout(0, words_layout))
    words_at = words_of_rows(weight, own_row, weight_stride, word, 32, BLOCK_WORDS)
    above_at = words_at
    if ABOVE > 0:
        own_row = weight_row(tile, n, gl.arange(0, BN, gl.SliceLayout(1, above_layout)), BN, GATED)
        word = gl.arange(0, CHUNK * ABOVE, gl.SliceLayout(0, above_layout))
        above_at = words_above(weight, own_row, weight_stride, word, ABOVE, BLOCK_WORDS, KIND)
    for chunk in gl.static_range(STAGES - 1):
        copy_words(words.index(chunk), words_at, first + chunk * CHUNK, end, words_layout, 32, BLOCK_WORDS)
        if ABOVE > 0:
            copy_words(
                above.index(chunk), above_at, first + chunk * CHUNK, end, above_layout, ABOVE, BLOCK_WORDS
            )
    in_block = weight_row(tile, n, gl.arange(0, BN, gl.SliceLayout(1, left)), BN, GATED) % 16
    fields_from = scales_from(weight_scale, tile, n, BN, CHUNK, FIELDS, KIND, GATED)
    fields = ()
    for chunk in gl.static_range(AHEAD):
        fields += load_chunk_fields(fields_from, first + chunk * CHUNK, end - 1, FIELDS, KIND)
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
        words, above, shared_x, scales, words_at, above_at, x_at, row < rows, fields_from, fields, in_block,
        first, units, total, layout, words_layout, above_layout, rows_layout, CHUNK, STAGES, AHEAD, EVEN,
        WIDTH, FIELDS, ABOVE, BLOCK_WORDS, KIND, PARTS,
    )  # fmt: skip
    async_copy.wait_group(0)
    return total


@gluon.jit
def slot_at(slots, program, layout: gl.constexpr, BN: gl.constexpr, BM: gl.constexpr):
    """Where a program's sums [BN, BM] lie in `slots`."""
    in_tile = gl.arange(0, BN, gl.SliceLayout(1, layout))
    row = gl.arange(0, BM, gl.SliceLayout(0, layout))
    return slots + program * (BN * BM) + (in_tile[:, None] * BM + row[None, :])


# Triton would compile other kernels for a value of 1 and for multiples of 16.
@gluon.jit(do_not_specialize=["rows", "n", "units", "all_units", "share", "more"])
def left_kernel(
    x, weight, weight_scale, out, slots, flags, rows, n, x_stride, weight_stride, units, all_units, share,
    more,
    BM: gl.constexpr, BN: gl.constexpr, CHUNK: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr,
    EVEN: gl.constexpr, KIND: gl.constexpr, WIDTH: gl.constexpr, FIELDS: gl.constexpr, ABOVE: gl.constexpr,
    BLOCK_WORDS: gl.constexpr, PARTS: gl.constexpr, GATED: gl.constexpr, CUT: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """BM rows by tiles of BN weight rows, each over one K split of `units` units.

    all_units: units of a whole row. weight_scale: words of 32 bits. KIND to PARTS: the weight's LeftForm.
    EVEN: `units` is a multiple of CHUNK. GATED: as `weight_row` has it. CUT: programs share the tasks, each
    `share` chunks and the first `more` one chunk more; a program begins with its last task and hands its sums
    over in `slots`, if the next program completes them; without CUT, a program has one task.
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [gl.num_warps(), 1], [16, 8])
    # Row tiles of one weight tile are neighbours, so that all but the first find it in L2.
    row_tiles = (rows + BM - 1) // BM
    words = gl.allocate_shared_memory(gl.int16, [STAGES, BN, CHUNK * 32], memory_layout(CHUNK * 32))
    shared_x = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BM, CHUNK * 128], memory_layout(CHUNK * 128))
    above = words
    if ABOVE > 0:
        above = gl.allocate_shared_memory(gl.int16, [STAGES, BN, CHUNK * ABOVE], memory_layout(CHUNK * ABOVE))
    COUNT: gl.constexpr = count_numbers(KIND, FIELDS)
    scales = gl.allocate_shared_memory(gl.int32, [CHUNK * BN, COUNT], kept_memory(COUNT))
    total = gl.zeros([BN, BM], gl.float32, layout)
    if CUT:
        program = gl.program_id(0)
        begin = program * share + gl.minimum(program, more)
        end = begin + share + (program < more).to(gl.int32)
        length = (units + CHUNK - 1) // CHUNK
        tiles = (n + BN - 1) // BN * row_tiles
        task = (end - 1) // length
        while task * length + length > begin:
            from_chunk = gl.maximum(begin - task * length, 0)
            to_chunk = gl.minimum(end - task * length, length)
            tile = task % tiles // row_tiles
            first_row = task % row_tiles * BM
            partial = task // tiles
            total = gl.zeros([BN, BM], gl.float32, layout)
            if from_chunk > 0:
                await_flag(flags + (program - 1))
                # Past L1, which does not see what other processors store.
                total = gl.load(slot_at(slots, program - 1, layout, BN, BM), cache_modifier=".cg")
            first = partial * units + from_chunk * CHUNK
            total = sum_task(
                x, weight, weight_scale, words, above, shared_x, scales, tile, first_row, first,
                partial * units + gl.minimum(to_chunk * CHUNK, units) - first, rows, n, x_stride,
                weight_stride, total, layout, BM, BN, CHUNK, STAGES, AHEAD, EVEN, KIND, WIDTH, FIELDS, ABOVE,
                BLOCK_WORDS, PARTS, GATED, PDL,
            )  # fmt: skip
            if to_chunk < length:
                gl.store(slot_at(slots, program, layout, BN, BM), total)
                set_flag(flags + program)
            else:
                total = finish(total, weight_scale, tile, n, all_units, layout, BN, FIELDS, KIND, GATED)
                store_tile(total, out, tile, first_row, partial, rows, n, layout, BN, BM, GATED)
            task -= 1
    else:
        tile = gl.program_id(0) // row_tiles
        first_row = gl.program_id(0) % row_tiles * BM
        partial = gl.program_id(1)
        total = sum_task(
            x, weight, weight_scale, words, above, shared_x, scales, tile, first_row, partial * units, units,
            rows, n, x_stride, weight_stride, total, layout, BM, BN, CHUNK, STAGES, AHEAD, EVEN, KIND, WIDTH,
            FIELDS, ABOVE, BLOCK_WORDS, PARTS, GATED, PDL,
        )  # fmt: skip
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
    device = device_of(x.device.index)
    units = k // UNIT
    tasks = triton.cdiv(rows, tile.block_m) * triton.cdiv(n, tile.block_n)
    grid: tuple[int, ...] = (tasks, k_splits)
    slots, flags, shares, limit = None, None, (0, 0), {}
    programs = tile.per_processor * device.num_processors
    is_cut = 0 < programs < tasks * k_splits
    if is_cut:
        grid = (programs,)
        shares = divmod(tasks * k_splits * triton.cdiv(units // k_splits, tile.chunk), programs)
        slots = torch.empty(programs * tile.block_n * tile.block_m, dtype=torch.float32, device=x.device)
        flags = zero_counters(x.device)
        limit = {"maxnreg": tile.most_registers}
    left_kernel[grid](
        x,
        weight.words,
        weight.scales,
        out,
        slots,
        flags,
        rows,
        n,
        # One row may have any stride; another value would compile another kernel.
        x.stride(0) if rows > 1 else k,
        weight.words.stride(0),
        units // k_splits,
        units,
        *shares,
        BM=tile.block_m,
        BN=tile.block_n,
        CHUNK=tile.chunk,
        STAGES=tile.num_stages,
        AHEAD=tile.ahead,
        EVEN=units // k_splits % tile.chunk == 0,
        **weight.form.constants(),
        GATED=gated,
        CUT=is_cut,
        PDL=device.has_dependent_launch,
        num_warps=tile.num_warps,
        launch_pdl=device.has_dependent_launch,
        **limit,
        **OPTIONS,
    )
    return out
