"""A product of grouped experts in codes: integers of four bits (ops.int4) and scaled codes (ops.blocks).

A program multiplies some of an expert's weight rows by a tile of its pairs, unit by unit, as `left_product`
does: a pair has the same bits in tiles of every size. The shared expert may be plain: its tiles then multiply
the weight as it is, in the same launch.

A tile is an entry of `plan`'s table. So few rows that one tile holds them need no table (`tiles` is None): an
entry is a pair, a lane is a row, and the first row that chose an expert multiplies it for all rows.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_mtp.ops.left_decode import finish
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
from compiled_mtp.ops.left_scales import fields_of, load_fields


@gluon.jit
def lanes_of(ids, pairs, lane, expert, begin, count, rows, SLOTS: gl.constexpr, HAS_TABLE: gl.constexpr):
    """Of each lane of a tile: its pair, the pair's row of hidden values, and whether there is one."""
    if HAS_TABLE:
        is_row = lane < count
        return gl.load(pairs + begin + lane, mask=is_row, other=0), begin + lane, is_row
    else:
        slot = lane * 0 - 1
        for index in gl.static_range(SLOTS):
            chosen = gl.load(ids + lane * SLOTS + index, mask=lane < rows, other=-1)
            slot = gl.where(chosen == expert, index, slot)
        pair = lane * SLOTS + slot
        return pair, pair, slot >= 0


@gluon.jit
def find_tile(
    ids, tiles, pairs, rows, num_tiles, layout: gl.constexpr, SLOTS: gl.constexpr, BM: gl.constexpr
):
    """This program's expert, where its tile's pairs begin in the table, their number, and if it has any."""
    entry = gl.program_id(1)
    if tiles is None:
        expert = gl.load(ids + entry)
        lane = gl.arange(0, BM, gl.SliceLayout(0, layout))
        pair, _, is_row = lanes_of(ids, pairs, lane, expert, 0, 0, rows, SLOTS, False)
        return expert.to(gl.int64), 0, 0, gl.min(gl.where(is_row, pair, BM * SLOTS), 0) == entry
    else:
        expert = gl.load(tiles + entry).to(gl.int64)
        begin = gl.load(tiles + num_tiles + entry)
        return expert, begin, gl.load(tiles + 2 * num_tiles + entry), expert >= 0


@gluon.jit
def rows_at(
    x, pair, place, stride, columns: gl.constexpr, layout: gl.constexpr, SLOTS: gl.constexpr,
    GATED: gl.constexpr,
):  # fmt: skip
    """Where the first `columns` columns of the lanes' rows lie: GATED, the rows of x, else the pairs' own."""
    row = pair // SLOTS if GATED else place
    return x + row.to(gl.int64)[:, None] * stride + gl.arange(0, columns, gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def start_codes(
    words, scales, expert, n, units, scale_words,
    layout: gl.constexpr, BN: gl.constexpr, CHUNK: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr,
    KIND: gl.constexpr, FIELDS: gl.constexpr, ABOVE: gl.constexpr, BLOCK_WORDS: gl.constexpr,
    GATED: gl.constexpr,
):  # fmt: skip
    """Begin to copy the first stages of an expert's weight rows, and load their scales."""
    tile = gl.program_id(0)
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    words_layout: gl.constexpr = copy_layout(CHUNK * 32, gl.num_warps())
    above_layout: gl.constexpr = copy_layout(CHUNK * (ABOVE if ABOVE > 0 else 32), gl.num_warps())
    stride = units * (BLOCK_WORDS // 16)
    words += expert * n * stride
    scales += expert * scale_words
    codes = gl.allocate_shared_memory(gl.int16, [STAGES, BN, CHUNK * 32], memory_layout(CHUNK * 32))
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
    row = weight_row(tile, n, gl.arange(0, BN, gl.SliceLayout(1, left)), BN, GATED)
    fields_at, step = fields_of(scales, row, n, FIELDS, KIND)
    fields = load_fields(fields_at, row % 16, step, 0, units - 1, AHEAD * CHUNK, FIELDS, KIND)
    return codes, above, words_at, above_at, scales, row % 16, fields_at, step, fields


@gluon.jit
def sum_codes(
    x, started, ids, pairs, expert, begin, count, rows, n, x_stride, units,
    layout: gl.constexpr, SLOTS: gl.constexpr, HAS_TABLE: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    CHUNK: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr, EVEN: gl.constexpr, KIND: gl.constexpr,
    WIDTH: gl.constexpr, FIELDS: gl.constexpr, ABOVE: gl.constexpr, BLOCK_WORDS: gl.constexpr,
    PARTS: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """The sums [BN weight rows, BM pairs] of what `start_codes` started."""
    codes, above, words_at, above_at, scales, row, fields_at, step, fields = started
    words_layout: gl.constexpr = copy_layout(CHUNK * 32, gl.num_warps())
    above_layout: gl.constexpr = copy_layout(CHUNK * (ABOVE if ABOVE > 0 else 32), gl.num_warps())
    rows_layout: gl.constexpr = copy_layout(CHUNK * 128, gl.num_warps())
    shared_x = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BM, CHUNK * 128], memory_layout(CHUNK * 128))
    lane = gl.arange(0, BM, gl.SliceLayout(1, rows_layout))
    pair, place, is_row = lanes_of(ids, pairs, lane, expert, begin, count, rows, SLOTS, HAS_TABLE)
    x_at = rows_at(x, pair, place, x_stride, CHUNK * 128, rows_layout, SLOTS, GATED)
    for chunk in gl.static_range(STAGES - 1):
        copy_rows(shared_x.index(chunk), x_at, is_row, chunk * CHUNK, units, rows_layout)
    total = sum_units(
        codes, above, shared_x, words_at, above_at, x_at, is_row, fields_at, row, step, 0, units, fields,
        gl.zeros([BN, BM], gl.float32, layout), layout, words_layout, above_layout, rows_layout, CHUNK,
        STAGES, AHEAD, EVEN, WIDTH, FIELDS, ABOVE, BLOCK_WORDS, KIND, PARTS,
    )  # fmt: skip
    async_copy.wait_group(0)
    return finish(total, scales, gl.program_id(0), n, units, layout, BN, FIELDS, KIND, GATED)


@gluon.jit
def copy_columns(to, at, is_row, first, end, layout: gl.constexpr):
    """Copy as many columns of rows as `to` holds, from `first` on; zeros from `end` on."""
    column = gl.arange(0, to.shape[1], gl.SliceLayout(0, layout))
    async_load(to, at + first, mask=is_row[:, None] & (column < end - first)[None, :])


@gluon.jit
def sum_plain(
    x, weight, ids, pairs, expert, begin, count, rows, n, x_stride, width,
    layout: gl.constexpr, SLOTS: gl.constexpr, HAS_TABLE: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """The sums [BN weight rows, BM pairs] of a plain weight [N, width]."""
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, layout, 2)
    copies: gl.constexpr = copy_layout(64, gl.num_warps())
    shared_weight = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, 64], memory_layout(64))
    shared_x = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BM, 64], memory_layout(64))
    row = weight_row(gl.program_id(0), n, gl.arange(0, BN, gl.SliceLayout(1, copies)), BN, GATED)
    column = gl.arange(0, 64, gl.SliceLayout(0, copies))
    weight_at = weight + row.to(gl.int64)[:, None] * width + column[None, :]
    lane = gl.arange(0, BM, gl.SliceLayout(1, copies))
    pair, place, is_row = lanes_of(ids, pairs, lane, expert, begin, count, rows, SLOTS, HAS_TABLE)
    x_at = rows_at(x, pair, place, x_stride, 64, copies, SLOTS, GATED)
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
    total, out, ids, pairs, expert, begin, count, rows, n,
    layout: gl.constexpr, SLOTS: gl.constexpr, HAS_TABLE: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    GATED: gl.constexpr,
):  # fmt: skip
    """Store the sums [BN weight rows, BM pairs] in out [pairs, N]: GATED, silu(gate) * up as `plan` sorts the
    pairs, else in the pairs' own order."""
    tile = gl.program_id(0)
    lane = gl.arange(0, BM, gl.SliceLayout(0, layout))
    pair, place, is_row = lanes_of(ids, pairs, lane, expert, begin, count, rows, SLOTS, HAS_TABLE)
    to_row = place if GATED else pair
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


@gluon.jit(do_not_specialize=["rows", "n", "units", "scale_words", "num_tiles"])
def gate_up_codes_kernel(
    x, gate_up, gate_up_scale, shared_gate_up, ids, tiles, pairs, hidden, rows, n, x_stride, units,
    scale_words, num_tiles,
    SLOTS: gl.constexpr, EXPERTS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, CHUNK: gl.constexpr,
    STAGES: gl.constexpr, PLAIN_STAGES: gl.constexpr, AHEAD: gl.constexpr, EVEN: gl.constexpr,
    KIND: gl.constexpr, WIDTH: gl.constexpr, FIELDS: gl.constexpr, ABOVE: gl.constexpr,
    BLOCK_WORDS: gl.constexpr, PARTS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """hidden[pair as `plan` sorts them] = silu(gate x) * up x of the pair's row of x.

    scale_words: 32-bit words of an expert's scales. shared_gate_up: the plain weight of expert EXPERTS, None
    if it has codes. KIND to PARTS: the weight's LeftForm.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [gl.num_warps(), 1], [16, 8])
    HAS_TABLE: gl.constexpr = tiles is not None
    expert, begin, count, has_pairs = find_tile(ids, tiles, pairs, rows, num_tiles, layout, SLOTS, BM)
    if not has_pairs:
        return
    total = gl.zeros([BN, BM], gl.float32, layout)
    if shared_gate_up is not None and expert == EXPERTS:
        total = sum_plain(
            x, shared_gate_up, ids, pairs, expert, begin, count, rows, n, x_stride, units * 128, layout,
            SLOTS, HAS_TABLE, BM, BN, PLAIN_STAGES, True,
        )  # fmt: skip
    else:
        started = start_codes(
            gate_up, gate_up_scale, expert, n, units, scale_words, layout, BN, CHUNK, STAGES, AHEAD, KIND,
            FIELDS, ABOVE, BLOCK_WORDS, True,
        )  # fmt: skip
        total = sum_codes(
            x, started, ids, pairs, expert, begin, count, rows, n, x_stride, units, layout, SLOTS, HAS_TABLE,
            BM, BN, CHUNK, STAGES, AHEAD, EVEN, KIND, WIDTH, FIELDS, ABOVE, BLOCK_WORDS, PARTS, True,
        )  # fmt: skip
    store_pairs(
        total, hidden, ids, pairs, expert, begin, count, rows, n, layout, SLOTS, HAS_TABLE, BM, BN, True
    )


@gluon.jit(do_not_specialize=["rows", "n", "units", "scale_words", "num_tiles"])
def down_codes_kernel(
    hidden, down, down_scale, shared_down, ids, tiles, pairs, results, rows, n, x_stride, units,
    scale_words, num_tiles,
    SLOTS: gl.constexpr, EXPERTS: gl.constexpr, EARLY: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    CHUNK: gl.constexpr, STAGES: gl.constexpr, PLAIN_STAGES: gl.constexpr, AHEAD: gl.constexpr,
    EVEN: gl.constexpr, KIND: gl.constexpr, WIDTH: gl.constexpr, FIELDS: gl.constexpr, ABOVE: gl.constexpr,
    BLOCK_WORDS: gl.constexpr, PARTS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """results[pair] = down times the pair's row of hidden, float32; arguments: see gate_up_codes_kernel.

    EARLY: the kernel before is that of gate and up, which has waited for all of ids, tiles and pairs. So a
    program's first weights are on their way while that one ends.
    """
    if PDL and not EARLY:
        gdc_wait()
    layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [gl.num_warps(), 1], [16, 8])
    HAS_TABLE: gl.constexpr = tiles is not None
    expert, begin, count, has_pairs = find_tile(ids, tiles, pairs, rows, num_tiles, layout, SLOTS, BM)
    if not has_pairs:
        if PDL:
            gdc_wait()
        return
    if shared_down is not None and expert == EXPERTS:
        if PDL:
            gdc_wait()
        total = sum_plain(
            hidden, shared_down, ids, pairs, expert, begin, count, rows, n, x_stride, units * 128, layout,
            SLOTS, HAS_TABLE, BM, BN, PLAIN_STAGES, False,
        )  # fmt: skip
        store_pairs(
            total, results, ids, pairs, expert, begin, count, rows, n, layout, SLOTS, HAS_TABLE, BM, BN, False
        )
        return
    started = start_codes(
        down, down_scale, expert, n, units, scale_words, layout, BN, CHUNK, STAGES, AHEAD, KIND, FIELDS,
        ABOVE, BLOCK_WORDS, False,
    )  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    total = sum_codes(
        hidden, started, ids, pairs, expert, begin, count, rows, n, x_stride, units, layout, SLOTS, HAS_TABLE,
        BM, BN, CHUNK, STAGES, AHEAD, EVEN, KIND, WIDTH, FIELDS, ABOVE, BLOCK_WORDS, PARTS, False,
    )  # fmt: skip
    store_pairs(
        total, results, ids, pairs, expert, begin, count, rows, n, layout, SLOTS, HAS_TABLE, BM, BN, False
    )
