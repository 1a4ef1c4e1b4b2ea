"""A product of grouped experts in codes: integers of four bits (ops.int4) and scaled codes (ops.blocks).

A program multiplies some of an expert's weight rows by a tile of its pairs, unit by unit, as `left_product`
does: a pair has the same bits in tiles of every size. The shared expert may be plain: its tiles then multiply
the weight as it is, in the same launch.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_mtp.ops.left_decode import fields_of, finish, load_fields
from compiled_mtp.ops.left_operand import (
    async_load,
    copy_layout,
    copy_rows,
    copy_words,
    halves_of,
    memory_layout,
    weight_row,
    words_above,
    words_of_rows,
)
from compiled_mtp.ops.left_product import sum_units


@gluon.jit
def pairs_of(pairs, begin, lane, is_row):
    """The pair of each lane that has one."""
    return gl.load(pairs + begin + lane, mask=is_row, other=0)


@gluon.jit
def rows_at(
    x, pairs, begin, lane, is_row, stride, columns: gl.constexpr, layout: gl.constexpr, SLOTS: gl.constexpr,
    GATED: gl.constexpr,
):  # fmt: skip
    """Where the first `columns` columns of the lanes' rows lie: GATED, x's row of a pair, else the sorted
    pair's own."""
    row = pairs_of(pairs, begin, lane, is_row) // SLOTS if GATED else begin + lane
    return x + row.to(gl.int64)[:, None] * stride + gl.arange(0, columns, gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def sum_codes(
    x, words, scales, pairs, tile, begin, count, n, x_stride, units,
    layout: gl.constexpr, SLOTS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, CHUNK: gl.constexpr,
    STAGES: gl.constexpr, AHEAD: gl.constexpr, EVEN: gl.constexpr, KIND: gl.constexpr, WIDTH: gl.constexpr,
    FIELDS: gl.constexpr, ABOVE: gl.constexpr, BLOCK_WORDS: gl.constexpr, PARTS: gl.constexpr,
    GATED: gl.constexpr,
):  # fmt: skip
    """The sums [BN weight rows, BM pairs] of an expert's codes; words, scales: where its own begin."""
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    words_layout: gl.constexpr = copy_layout(CHUNK * 32, gl.num_warps())
    above_layout: gl.constexpr = copy_layout(CHUNK * (ABOVE if ABOVE > 0 else 32), gl.num_warps())
    rows_layout: gl.constexpr = copy_layout(CHUNK * 128, gl.num_warps())
    stride = units * (BLOCK_WORDS // 16)
    codes = gl.allocate_shared_memory(gl.int16, [STAGES, BN, CHUNK * 32], memory_layout(CHUNK * 32))
    shared_x = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BM, CHUNK * 128], memory_layout(CHUNK * 128))
    own_row = weight_row(tile, n, gl.arange(0, BN, gl.SliceLayout(1, words_layout)), BN, GATED)
    word = gl.arange(0, CHUNK * 32, gl.SliceLayout(0, words_layout))
    words_at = words_of_rows(words, own_row, stride, word, 32, BLOCK_WORDS)
    above = codes
    above_at = words_at
    if ABOVE > 0:
        above = gl.allocate_shared_memory(gl.int16, [STAGES, BN, CHUNK * ABOVE], memory_layout(CHUNK * ABOVE))
        own_row = weight_row(tile, n, gl.arange(0, BN, gl.SliceLayout(1, above_layout)), BN, GATED)
        word = gl.arange(0, CHUNK * ABOVE, gl.SliceLayout(0, above_layout))
        above_at = words_above(words, own_row, stride, word, ABOVE, BLOCK_WORDS, KIND)
    for chunk in gl.static_range(STAGES - 1):
        copy_words(codes.index(chunk), words_at, chunk * CHUNK, units, words_layout, 32, BLOCK_WORDS)
        if ABOVE > 0:
            copy_words(above.index(chunk), above_at, chunk * CHUNK, units, above_layout, ABOVE, BLOCK_WORDS)
    own_row = weight_row(tile, n, gl.arange(0, BN, gl.SliceLayout(1, left)), BN, GATED)
    fields_at, step = fields_of(scales, own_row, n, FIELDS, KIND)
    fields = load_fields(fields_at, own_row % 16, step, 0, units - 1, AHEAD * CHUNK, FIELDS, KIND)
    lane = gl.arange(0, BM, gl.SliceLayout(1, rows_layout))
    is_row = lane < count
    x_at = rows_at(x, pairs, begin, lane, is_row, x_stride, CHUNK * 128, rows_layout, SLOTS, GATED)
    for chunk in gl.static_range(STAGES - 1):
        copy_rows(shared_x.index(chunk), x_at, is_row, chunk * CHUNK, units, rows_layout)
    total = sum_units(
        codes, above, shared_x, words_at, above_at, x_at, is_row, fields_at, own_row % 16, step, 0, units,
        fields, gl.zeros([BN, BM], gl.float32, layout), layout, words_layout, above_layout, rows_layout,
        CHUNK, STAGES, AHEAD, EVEN, WIDTH, FIELDS, ABOVE, BLOCK_WORDS, KIND, PARTS,
    )  # fmt: skip
    async_copy.wait_group(0)
    return finish(total, scales, tile, n, units, layout, BN, FIELDS, KIND, GATED)


@gluon.jit
def copy_columns(to, at, is_row, first, end, layout: gl.constexpr):
    """Copy as many columns of rows as `to` holds, from `first` on; zeros from `end` on."""
    column = gl.arange(0, to.shape[1], gl.SliceLayout(0, layout))
    async_load(to, at + first, mask=is_row[:, None] & (column < end - first)[None, :])


@gluon.jit
def sum_plain(
    x, weight, pairs, tile, begin, count, n, x_stride, width,
    layout: gl.constexpr, SLOTS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    GATED: gl.constexpr,
):  # fmt: skip
    """The sums [BN weight rows, BM pairs] of a plain weight [N, width]."""
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, layout, 2)
    copies: gl.constexpr = copy_layout(64, gl.num_warps())
    shared_weight = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, 64], memory_layout(64))
    shared_x = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BM, 64], memory_layout(64))
    row = weight_row(tile, n, gl.arange(0, BN, gl.SliceLayout(1, copies)), BN, GATED)
    column = gl.arange(0, 64, gl.SliceLayout(0, copies))
    weight_at = weight + row.to(gl.int64)[:, None] * width + column[None, :]
    lane = gl.arange(0, BM, gl.SliceLayout(1, copies))
    is_row = lane < count
    x_at = rows_at(x, pairs, begin, lane, is_row, x_stride, 64, copies, SLOTS, GATED)
    for stage in gl.static_range(STAGES - 1):
        copy_columns(shared_weight.index(stage), weight_at, row < n, stage * 64, width, copies)
        copy_columns(shared_x.index(stage), x_at, is_row, stage * 64, width, copies)
        async_copy.commit_group()
    total = gl.zeros([BN, BM], gl.float32, layout)
    stage = 0
    for first in range(0, width, 64):
        async_copy.wait_group(STAGES - 2)
        columns = shared_x.index(stage).permute([1, 0]).load(right)
        total = mma_v2(shared_weight.index(stage).load(left), columns, total, input_precision="ieee")
        # The stage of the columns before these, which all warps have left.
        free = (stage + STAGES - 1) % STAGES
        ahead = first + (STAGES - 1) * 64
        copy_columns(shared_weight.index(free), weight_at, row < n, ahead, width, copies)
        copy_columns(shared_x.index(free), x_at, is_row, ahead, width, copies)
        async_copy.commit_group()
        stage = (stage + 1) % STAGES
    async_copy.wait_group(0)
    return total


@gluon.jit
def store_pairs(
    total, out, tile, to_row, is_row, n, layout: gl.constexpr, BN: gl.constexpr, GATED: gl.constexpr
):
    """Store the sums [BN weight rows, BM pairs] in rows `to_row` of out [pairs, N], or silu(gate) * up."""
    in_tile = gl.arange(0, BN, gl.SliceLayout(1, layout))
    if GATED:
        width = n // 2
        to_column = tile * (BN // 2) + in_tile // 16 * 8 + in_tile % 8
    else:
        width = n
        to_column = tile * BN + in_tile
    at = to_row.to(gl.int64)[None, :] * width + to_column[:, None]
    is_stored = is_row[None, :] & (to_column < width)[:, None]
    if GATED:
        gate, up = halves_of(total)
        total = gate / (1.0 + gl.exp(-gate)) * up
        at, _ = halves_of(at)
        is_stored, _ = halves_of(is_stored.to(gl.int8))
        is_stored = is_stored != 0
    gl.store(out + at, total.to(out.dtype.element_ty), mask=is_stored)


@gluon.jit
def multiply_pairs(
    x, words, scales, shared, tiles, pairs, out, n, x_stride, units, scale_words, num_tiles,
    SLOTS: gl.constexpr, EXPERTS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, CHUNK: gl.constexpr,
    STAGES: gl.constexpr, AHEAD: gl.constexpr, EVEN: gl.constexpr, KIND: gl.constexpr, WIDTH: gl.constexpr,
    FIELDS: gl.constexpr, ABOVE: gl.constexpr, BLOCK_WORDS: gl.constexpr, PARTS: gl.constexpr,
    GATED: gl.constexpr,
):  # fmt: skip
    """One tile of pairs, sorted by expert, by BN of its expert's N weight rows.

    scale_words: 32-bit words of an expert's scales. shared: the plain weight of expert EXPERTS, None if it
    has codes. KIND to PARTS: the weight's LeftForm.
    """
    tile = gl.program_id(0)
    entry = tiles + gl.program_id(1)
    expert = gl.load(entry).to(gl.int64)
    if expert < 0:
        return
    begin = gl.load(entry + num_tiles)
    count = gl.load(entry + 2 * num_tiles)
    layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [gl.num_warps(), 1], [16, 8])
    total = gl.zeros([BN, BM], gl.float32, layout)
    if shared is not None and expert == EXPERTS:
        total = sum_plain(
            x, shared, pairs, tile, begin, count, n, x_stride, units * 128, layout, SLOTS, BM, BN, STAGES,
            GATED,
        )  # fmt: skip
    else:
        own_words = words + expert * n * units * (BLOCK_WORDS // 16)
        own_scales = scales + expert * scale_words
        total = sum_codes(
            x, own_words, own_scales, pairs, tile, begin, count, n, x_stride, units, layout, SLOTS, BM, BN,
            CHUNK, STAGES, AHEAD, EVEN, KIND, WIDTH, FIELDS, ABOVE, BLOCK_WORDS, PARTS, GATED,
        )  # fmt: skip
    lane = gl.arange(0, BM, gl.SliceLayout(0, layout))
    is_row = lane < count
    to_row = begin + lane if GATED else pairs_of(pairs, begin, lane, is_row)
    store_pairs(total, out, tile, to_row, is_row, n, layout, BN, GATED)


@gluon.jit(do_not_specialize=["n", "units", "scale_words", "num_tiles"])
def gate_up_codes_kernel(
    x, words, scales, shared, tiles, pairs, hidden, n, x_stride, units, scale_words, num_tiles,
    SLOTS: gl.constexpr, EXPERTS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, CHUNK: gl.constexpr,
    STAGES: gl.constexpr, AHEAD: gl.constexpr, EVEN: gl.constexpr, KIND: gl.constexpr, WIDTH: gl.constexpr,
    FIELDS: gl.constexpr, ABOVE: gl.constexpr, BLOCK_WORDS: gl.constexpr, PARTS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """hidden[sorted pair] = silu(gate x) * up x of the pair's row of x; arguments: see multiply_pairs."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    multiply_pairs(
        x, words, scales, shared, tiles, pairs, hidden, n, x_stride, units, scale_words, num_tiles, SLOTS,
        EXPERTS, BM, BN, CHUNK, STAGES, AHEAD, EVEN, KIND, WIDTH, FIELDS, ABOVE, BLOCK_WORDS, PARTS, True,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["n", "units", "scale_words", "num_tiles"])
def down_codes_kernel(
    hidden, words, scales, shared, tiles, pairs, results, n, x_stride, units, scale_words, num_tiles,
    SLOTS: gl.constexpr, EXPERTS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, CHUNK: gl.constexpr,
    STAGES: gl.constexpr, AHEAD: gl.constexpr, EVEN: gl.constexpr, KIND: gl.constexpr, WIDTH: gl.constexpr,
    FIELDS: gl.constexpr, ABOVE: gl.constexpr, BLOCK_WORDS: gl.constexpr, PARTS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """results[pair] = down times the sorted pair's row of hidden, float32; arguments: see multiply_pairs."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    multiply_pairs(
        hidden, words, scales, shared, tiles, pairs, results, n, x_stride, units, scale_words, num_tiles,
        SLOTS, EXPERTS, BM, BN, CHUNK, STAGES, AHEAD, EVEN, KIND, WIDTH, FIELDS, ABOVE, BLOCK_WORDS, PARTS,
        False,
    )  # fmt: skip
