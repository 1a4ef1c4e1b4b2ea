"""The warps of `left_large_m_kernel` that load: units of the rows and of the weight, chunk after chunk."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_mtp.ops.left_operand import (
    async_load,
    copy_layout,
    weight_row,
    words_above,
    words_of_rows,
)
from compiled_mtp.ops.left_scales import field_addresses, field_step, fields_of, words_of_scales

# Triton 3.9 renames the function.
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.jit
def weight_addresses(
    weight, weight_scale, tile, n, weight_stride, GROUPS: gl.constexpr, AHEAD: gl.constexpr,
    KIND: gl.constexpr, FIELDS: gl.constexpr, ABOVE: gl.constexpr, BLOCK_WORDS: gl.constexpr,
    GATED: gl.constexpr,
):  # fmt: skip
    """Where the words of the first units of each group's weight rows lie. If AHEAD is 0, also where their
    scales begin, and each row in its block of 16."""
    words_layout: gl.constexpr = copy_layout(32, 4)
    above_layout: gl.constexpr = copy_layout(ABOVE if ABOVE > 0 else 32, 4)
    fields_layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    words_at = ()
    above_at = ()
    fields_at = ()
    for group in gl.static_range(GROUPS):
        own_tile = tile * GROUPS + group
        row = weight_row(own_tile, n, gl.arange(0, 64, gl.SliceLayout(1, words_layout)), 64, GATED)
        word = gl.arange(0, 32, gl.SliceLayout(0, words_layout))
        words_at += (words_of_rows(weight, row, weight_stride, word, 32, BLOCK_WORDS),)
        if ABOVE > 0:
            row = weight_row(own_tile, n, gl.arange(0, 64, gl.SliceLayout(1, above_layout)), 64, GATED)
            word = gl.arange(0, ABOVE, gl.SliceLayout(0, above_layout))
            above_at += (words_above(weight, row, weight_stride, word, ABOVE, BLOCK_WORDS, KIND),)
        if AHEAD == 0:
            row = weight_row(own_tile, n, gl.arange(0, 64, fields_layout), 64, GATED)
            at, _ = fields_of(weight_scale, row, n, FIELDS, KIND)
            fields_at += ((at, row % 16),)
    return words_at, above_at, fields_at


@gluon.jit
def load_words(
    words, above, fields, from_memory, full, stage, unit, number, n, GROUPS: gl.constexpr,
    CHUNK: gl.constexpr, AHEAD: gl.constexpr, KIND: gl.constexpr, FIELDS: gl.constexpr, ABOVE: gl.constexpr,
    BLOCK_WORDS: gl.constexpr,
):  # fmt: skip
    """Copy CHUNK units of each group's weight rows to a stage, at most `number`, with their scales if AHEAD
    is 0.

    from_memory: as `weight_addresses` returns them.
    """
    PER_UNIT: gl.constexpr = words_of_scales(KIND, FIELDS)
    words_at, above_at, fields_at = from_memory
    for index in gl.static_range(CHUNK):
        if index == 0 or index < number:
            for group in gl.static_range(GROUPS):
                to = (stage * CHUNK + index) * GROUPS + group
                async_load(words.index(to), words_at[group] + (unit + index) * BLOCK_WORDS)
                if ABOVE > 0:
                    async_load(above.index(to), above_at[group] + (unit + index) * BLOCK_WORDS)
                if AHEAD == 0:
                    at, row = fields_at[group]
                    own_at = field_addresses(at, row, field_step(n, FIELDS, KIND), unit + index, FIELDS, KIND)
                    for word in gl.static_range(PER_UNIT):
                        async_load(fields.index(to * PER_UNIT + word), own_at[word])
    async_copy.mbarrier_arrive(full.index(stage), increment_count=False)


@gluon.jit
def load_rows(x, shared_x, full, stage, first_row, unit, number, BM: gl.constexpr, CHUNK: gl.constexpr):
    """Copy CHUNK units of the rows to a stage, at most `number`."""
    if CHUNK == 1 or number >= CHUNK:
        mbarrier.expect(full.index(stage), BM * 256 * CHUNK)
    else:
        for index in gl.static_range(1, CHUNK):
            if index == number:
                mbarrier.expect(full.index(stage), BM * 256 * index)
    for index in gl.static_range(CHUNK):
        if index == 0 or index < number:
            to = shared_x.index(stage * CHUNK + index)
            load_tile(x, [first_row, (unit + index) * 128], full.index(stage), to)


@gluon.jit
def load_chunks(
    sources, BM: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, CHUNK: gl.constexpr,
    AHEAD: gl.constexpr, KIND: gl.constexpr, FIELDS: gl.constexpr, ABOVE: gl.constexpr,
    BLOCK_WORDS: gl.constexpr, GATED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Copy the chunks of a program's tasks to shared memory, one to a stage.

    sources: as `left_large_m_kernel` has them. A stage's barrier in `full` completes when its copies have
    arrived, that in `empty` when all groups have read it.
    """
    (
        x, weight, weight_scale, words, above, fields, shared_x, full, empty, rows, n, weight_stride, units,
        num_tiles, begin, end,
    ) = sources  # fmt: skip
    length = (units + CHUNK - 1) // CHUNK
    row_tiles = (rows + BM - 1) // BM
    task = (end - 1) // length
    chunk = gl.maximum(begin - task * length, 0)
    to_chunk = end - task * length
    early = gl.minimum(to_chunk - chunk, STAGES)
    tile = task // row_tiles
    from_memory = weight_addresses(
        weight, weight_scale, tile % num_tiles, n, weight_stride, GROUPS, AHEAD, KIND, FIELDS, ABOVE,
        BLOCK_WORDS, GATED,
    )  # fmt: skip
    first = tile // num_tiles * units
    for stage in gl.static_range(STAGES):
        if stage < early:
            unit = (chunk + stage) * CHUNK
            load_words(
                words, above, fields, from_memory, full, stage, first + unit, units - unit, n, GROUPS, CHUNK,
                AHEAD, KIND, FIELDS, ABOVE, BLOCK_WORDS,
            )  # fmt: skip
    if PDL:
        gdc_wait()
        # The next kernel may come only now: measured for `linear`, two kernels that wait crowd a third.
        gdc_launch_dependents()
    first_row = task % row_tiles * BM
    for stage in gl.static_range(STAGES):
        if stage < early:
            unit = (chunk + stage) * CHUNK
            load_rows(x, shared_x, full, stage, first_row, first + unit, units - unit, BM, CHUNK)
    chunk += early
    stage = early % STAGES
    # The first wait for a stage that nothing has filled ends at once.
    phase = 1 - early // STAGES
    while task * length + length > begin:
        for later in range(chunk, to_chunk):
            unit = later * CHUNK
            mbarrier.wait(empty.index(stage), phase)
            load_rows(x, shared_x, full, stage, first_row, first + unit, units - unit, BM, CHUNK)
            load_words(
                words, above, fields, from_memory, full, stage, first + unit, units - unit, n, GROUPS, CHUNK,
                AHEAD, KIND, FIELDS, ABOVE, BLOCK_WORDS,
            )  # fmt: skip
            stage = stage + 1
            if stage == STAGES:
                stage = 0
                phase = phase ^ 1
        task -= 1
        if task * length + length > begin:
            chunk = gl.maximum(begin - task * length, 0)
            to_chunk = length
            tile = task // row_tiles
            from_memory = weight_addresses(
                weight, weight_scale, tile % num_tiles, n, weight_stride, GROUPS, AHEAD, KIND, FIELDS, ABOVE,
                BLOCK_WORDS, GATED,
            )  # fmt: skip
            first = tile // num_tiles * units
            first_row = task % row_tiles * BM
