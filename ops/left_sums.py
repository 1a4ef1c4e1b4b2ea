"""The warp groups of `left_large_m_kernel` that multiply: each decodes 64 weight rows of a task, unit after
unit, and sums their products."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_wait

from compiled_mtp.ops.left_decode import decode_part, finish, load_codes
from compiled_mtp.ops.left_operand import spread, store_tile, weight_row
from compiled_mtp.ops.left_scales import (
    fields_of,
    load_fields,
    own_fields,
    scale_of,
    value_scales,
    words_of_scales,
)
from compiled_mtp.ops.persistent_slots import await_flag, keep, load_slot, set_flag, store_slot, sums_layout


@gluon.jit
def add_scaled(
    sums, fields, total, PART: gl.constexpr, layout: gl.constexpr, WIDTH: gl.constexpr, KIND: gl.constexpr
):
    """total plus the sums of the columns of one scale, part PART among them, times that scale."""
    scale = scale_of(fields, PART * WIDTH // 32, PART * WIDTH % 32 // 16, KIND)
    scale = gl.convert_layout(scale, gl.SliceLayout(1, layout), assert_trivial=True)
    return gl.fma(sums, spread(scale, total), total)


@gluon.jit
def add_chunk(
    words, above, x, slot, fields, row, total, layout: gl.constexpr, GROUP: gl.constexpr,
    GROUPS: gl.constexpr, CHUNK: gl.constexpr, WIDTH: gl.constexpr, FIELDS: gl.constexpr, KIND: gl.constexpr,
    PARTS: gl.constexpr,
):  # fmt: skip
    """total [64, BM] plus the products of CHUNK units in shared memory from `slot` on, part by part.

    The sums of a scale are multiplied when the products of the next part are on their way: tensor cores work
    while they are, and while the parts of the next unit are decoded.
    """
    BM: gl.constexpr = x.shape[1]
    COUNT: gl.constexpr = 128 // WIDTH
    PER_UNIT: gl.constexpr = words_of_scales(KIND, FIELDS)
    sums = total
    waiting = total
    own = own_fields(fields[:PER_UNIT], row, FIELDS, KIND)
    before = own
    for unit in gl.static_range(CHUNK):
        at = slot + unit
        own_x = x.index(at)
        own_words = words.index(at * GROUPS + GROUP)
        own_above = above.index(at * GROUPS + GROUP)
        codes = load_codes(own_words, own_above, row, 0, WIDTH, KIND, gl.DotOperandLayout(0, layout, 2))
        before = own
        own = own_fields(fields[unit * PER_UNIT : (unit + 1) * PER_UNIT], row, FIELDS, KIND)
        for part in gl.static_range(COUNT):
            columns = own_x.slice(part * WIDTH, WIDTH, 1).permute([1, 0])
            scales = value_scales(own, part * WIDTH // 32, part * WIDTH % 32 // 16, KIND)
            decoded = decode_part(codes, scales, part, WIDTH, KIND)
            if PARTS == 0:
                sums = warpgroup_mma(decoded, columns, sums, is_async=True)
            else:
                if part % PARTS == 0:
                    waiting = sums
                    sums = gl.zeros([64, BM], gl.float32, layout)
                sums = warpgroup_mma(decoded, columns, sums, use_acc=part % PARTS > 0, is_async=True)
                if part % PARTS == 0 and unit + part > 0:
                    waiting = warpgroup_mma_wait(1, deps=[waiting])
                    if part == 0:
                        total = add_scaled(waiting, before, total, COUNT - 1, layout, WIDTH, KIND)
                    else:
                        total = add_scaled(waiting, own, total, part - 1, layout, WIDTH, KIND)
    sums = warpgroup_mma_wait(0, deps=[sums])
    if PARTS == 0:
        return sums
    else:
        return add_scaled(sums, own, total, COUNT - 1, layout, WIDTH, KIND)


@gluon.jit
def copied_fields(
    fields, slot, GROUP: gl.constexpr, GROUPS: gl.constexpr, COUNT: gl.constexpr, PER_UNIT: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """The words of the scales of COUNT units in shared memory from `slot` on."""
    own = ()
    for index in gl.static_range(COUNT):
        for word in gl.static_range(PER_UNIT):
            own += (fields.index(((slot + index) * GROUPS + GROUP) * PER_UNIT + word).load(layout),)
    return own


@gluon.constexpr_function
def one_strip(rows):
    """The strips of a group's sums, as ops.persistent_slots has them."""
    return (rows,)


@gluon.jit
def multiply_chunks(
    given, GROUP: gl.constexpr, BM: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
    CHUNK: gl.constexpr, AHEAD: gl.constexpr, KIND: gl.constexpr, WIDTH: gl.constexpr,
    FIELDS: gl.constexpr, PARTS: gl.constexpr, GATED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Multiply the rows of a program's tasks by the 64 weight rows of group GROUP, chunk after chunk.

    given: as `left_large_m_kernel` has it. A program begins with its last task, which the next program
    completes, and ends with the one that the program before began.
    """
    (
        weight_scale, out, words, above, shared_fields, shared_x, full, empty, slots, flags, rows, n, units,
        all_units, num_tiles, begin, end,
    ) = given  # fmt: skip
    layout: gl.constexpr = sums_layout(BM, False)
    STRIPS: gl.constexpr = one_strip(BM)
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    of_rows: gl.constexpr = gl.SliceLayout(1, left)
    PER_UNIT: gl.constexpr = words_of_scales(KIND, FIELDS)
    length = (units + CHUNK - 1) // CHUNK
    row_tiles = (rows + BM - 1) // BM
    own = gl.program_id(0) * GROUPS + GROUP
    if PDL:
        gdc_wait()
    stage = 0
    phase = 0
    task = (end - 1) // length
    while task * length + length > begin:
        from_chunk = gl.maximum(begin - task * length, 0)
        to_chunk = gl.minimum(end - task * length, length)
        own_tile = task // row_tiles % num_tiles * GROUPS + GROUP
        partial = task // row_tiles // num_tiles
        row = weight_row(own_tile, n, gl.arange(0, 64, of_rows), 64, GATED)
        fields_at, field_step = fields_of(weight_scale, row, n, FIELDS, KIND)
        in_block = row % 16
        last = partial * units + units - 1
        unit = partial * units + from_chunk * CHUNK
        fields = load_fields(fields_at, in_block, field_step, unit, last, AHEAD * CHUNK, FIELDS, KIND)
        total = gl.zeros([64, BM], gl.float32, layout)
        if from_chunk > 0:
            await_flag(flags + (own - GROUPS))
            total = keep(load_slot(slots, own - GROUPS, STRIPS, False)[0])
        for _ in range(from_chunk, gl.minimum(to_chunk, units // CHUNK)):
            if AHEAD > 0:
                later = unit + AHEAD * CHUNK
                fields += load_fields(fields_at, in_block, field_step, later, last, CHUNK, FIELDS, KIND)
            mbarrier.wait(full.index(stage), phase)
            if AHEAD == 0:
                fields = copied_fields(shared_fields, stage * CHUNK, GROUP, GROUPS, CHUNK, PER_UNIT, of_rows)
            total = add_chunk(
                words, above, shared_x, stage * CHUNK, fields, in_block, total, layout, GROUP, GROUPS, CHUNK,
                WIDTH, FIELDS, KIND, PARTS,
            )  # fmt: skip
            mbarrier.arrive(empty.index(stage), count=1)
            stage = stage + 1
            if stage == STAGES:
                stage = 0
                phase = phase ^ 1
            fields = fields[PER_UNIT * CHUNK :]
            unit += CHUNK
        if CHUNK > 1:  # noqa: SIM102  a constant and a number
            if to_chunk > units // CHUNK:
                mbarrier.wait(full.index(stage), phase)
                for index in range(units % CHUNK):
                    at = stage * CHUNK + index
                    if AHEAD == 0:
                        fields_left = copied_fields(shared_fields, at, GROUP, GROUPS, 1, PER_UNIT, of_rows)
                    else:
                        fields_left = load_fields(
                            fields_at, in_block, field_step, unit + index, last, 1, FIELDS, KIND
                        )
                    total = add_chunk(
                        words, above, shared_x, at, fields_left, in_block, total, layout,
                        GROUP, GROUPS, 1, WIDTH, FIELDS, KIND, PARTS,
                    )  # fmt: skip
                mbarrier.arrive(empty.index(stage), count=1)
                stage = stage + 1
                if stage == STAGES:
                    stage = 0
                    phase = phase ^ 1
        if to_chunk < length:
            store_slot((total,), slots, own, STRIPS)
            set_flag(flags + own)
        else:
            total = finish(total, weight_scale, own_tile, n, all_units, layout, 64, FIELDS, KIND, GATED)
            store_tile(total, out, own_tile, task % row_tiles * BM, partial, rows, n, layout, 64, BM, GATED)
        task -= 1
