"""A product of grouped experts in codes: integers of four bits (ops.int4) and scaled codes (ops.blocks).

A program multiplies some of an expert's weight rows by a tile of its pairs, unit by unit, as `left_product`
does: a pair has the same bits in tiles of every size. The shared expert may be plain: its tiles then multiply
the weight as it is, in the same launch.

A tile of pairs is an entry of `plan`'s table. A program has one tile of weight rows, or some neighbouring
ones. So few rows that one tile holds them need no table (`tiles` is None): an entry is a pair, a lane is a
row, and the first row that chose an expert multiplies it for all rows.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_mtp.ops.left_assembly import is_int4
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
from compiled_mtp.ops.left_product import add_unit
from compiled_mtp.ops.left_scales import field_addresses, fields_of, words_of_scales


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
def copy_chunk(
    codes, above, fields, stage, words_at, above_at, fields_at, row, step, first, end, CHUNK: gl.constexpr,
    EVEN: gl.constexpr, FIELDS: gl.constexpr, KIND: gl.constexpr, ABOVE: gl.constexpr,
    BLOCK_WORDS: gl.constexpr,
):  # fmt: skip
    """Copy a chunk of weight rows and its scales to a stage: units from `first` on, zeros from `end` on.

    EVEN: a chunk ends before `end` or begins behind it, and the latter is not copied.
    """
    PER_UNIT: gl.constexpr = words_of_scales(KIND, FIELDS)
    words_layout: gl.constexpr = copy_layout(CHUNK * 32, gl.num_warps())
    above_layout: gl.constexpr = copy_layout(CHUNK * (ABOVE if ABOVE > 0 else 32), gl.num_warps())
    if EVEN:
        if first < end:
            async_load(codes.index(stage), words_at + first * BLOCK_WORDS)
            if ABOVE > 0:
                async_load(above.index(stage), above_at + first * BLOCK_WORDS)
            for index in gl.static_range(CHUNK):
                addresses = field_addresses(fields_at, row, step, first + index, FIELDS, KIND)
                for word in gl.static_range(PER_UNIT):
                    async_load(fields.index((stage * CHUNK + index) * PER_UNIT + word), addresses[word])
    else:
        copy_words(codes.index(stage), words_at, first, end, words_layout, 32, BLOCK_WORDS)
        if ABOVE > 0:
            copy_words(above.index(stage), above_at, first, end, above_layout, ABOVE, BLOCK_WORDS)
        for index in gl.static_range(CHUNK):
            addresses = field_addresses(fields_at, row, step, first + index, FIELDS, KIND)
            for word in gl.static_range(PER_UNIT):
                at = fields.index((stage * CHUNK + index) * PER_UNIT + word)
                async_load(at, addresses[word], mask=(row >= 0) & (first + index < end))


@gluon.jit
def start_codes(
    words, scales, expert, n, units, scale_words,
    BN: gl.constexpr, TILES: gl.constexpr, CHUNK: gl.constexpr, STAGES: gl.constexpr, EVEN: gl.constexpr,
    KIND: gl.constexpr, FIELDS: gl.constexpr, ABOVE: gl.constexpr, BLOCK_WORDS: gl.constexpr,
    GATED: gl.constexpr,
):  # fmt: skip
    """Begin to copy the first stages of an expert's weight rows, with their scales."""
    tile = gl.program_id(0) * TILES
    words_layout: gl.constexpr = copy_layout(CHUNK * 32, gl.num_warps())
    above_layout: gl.constexpr = copy_layout(CHUNK * (ABOVE if ABOVE > 0 else 32), gl.num_warps())
    fields_layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    COUNT: gl.constexpr = STAGES * CHUNK * words_of_scales(KIND, FIELDS)
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
    fields = gl.allocate_shared_memory(gl.int32, [COUNT, BN], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    row = weight_row(tile, n, gl.arange(0, BN, fields_layout), BN, GATED)
    fields_at, step = fields_of(scales, row, n, FIELDS, KIND)
    for chunk in gl.static_range(STAGES - 1):
        copy_chunk(
            codes, above, fields, chunk, words_at, above_at, fields_at, row % 16, step, chunk * CHUNK, units,
            CHUNK, EVEN, FIELDS, KIND, ABOVE, BLOCK_WORDS,
        )  # fmt: skip
    return codes, above, fields, words_at, above_at, scales, fields_at, row % 16, step


@gluon.jit
def add_chunk(
    codes, above, shared_x, fields, stage, in_block, total, left_over, layout: gl.constexpr,
    CHUNK: gl.constexpr, EVEN: gl.constexpr, WIDTH: gl.constexpr, FIELDS: gl.constexpr, KIND: gl.constexpr,
    PARTS: gl.constexpr,
):  # fmt: skip
    """total plus the products of a stage, of which the first `left_over` units count."""
    PER_UNIT: gl.constexpr = words_of_scales(KIND, FIELDS)
    of_rows: gl.constexpr = gl.SliceLayout(1, gl.DotOperandLayout(0, layout, 2))
    own_codes = codes.index(stage)
    own_above = above.index(stage)
    own_x = shared_x.index(stage)
    for unit in gl.static_range(CHUNK):
        own = ()
        for word in gl.static_range(PER_UNIT):
            own += (fields.index((stage * CHUNK + unit) * PER_UNIT + word).load(of_rows),)
        if EVEN or unit == 0:
            total = add_unit(
                own_codes, own_above, own_x, own, in_block, total, layout, unit, WIDTH, FIELDS, KIND, PARTS
            )
        else:
            if unit < left_over:
                total = add_unit(
                    own_codes, own_above, own_x, own, in_block, total, layout, unit, WIDTH, FIELDS, KIND,
                    PARTS,
                )  # fmt: skip
    return total


@gluon.jit
def store_codes(
    x, started, out, ids, pairs, expert, begin, count, rows, n, x_stride, units,
    layout: gl.constexpr, SLOTS: gl.constexpr, HAS_TABLE: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    TILES: gl.constexpr, CHUNK: gl.constexpr, STAGES: gl.constexpr, EVEN: gl.constexpr, KIND: gl.constexpr,
    WIDTH: gl.constexpr, FIELDS: gl.constexpr, ABOVE: gl.constexpr, BLOCK_WORDS: gl.constexpr,
    PARTS: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Store the results of the program's tiles, of which `start_codes` has started the first.

    Chunks are copied STAGES - 1 ahead, those of the next tile while the last ones of a tile are multiplied.
    """
    codes, above, fields, words_at, above_at, scales, fields_at, copied_row, step = started
    rows_layout: gl.constexpr = copy_layout(CHUNK * 128, gl.num_warps())
    of_rows: gl.constexpr = gl.SliceLayout(1, gl.DotOperandLayout(0, layout, 2))
    # Words of codes and of scales from a tile to the next.
    NEXT_ROWS: gl.constexpr = BN // 2 if GATED else BN
    NEXT_FIELDS: gl.constexpr = NEXT_ROWS if is_int4(KIND) else NEXT_ROWS // 16 * 8 * FIELDS
    next_words = units * (BLOCK_WORDS // 16 * NEXT_ROWS)
    in_block = weight_row(gl.program_id(0) * TILES, n, gl.arange(0, BN, of_rows), BN, GATED) % 16
    shared_x = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BM, CHUNK * 128], memory_layout(CHUNK * 128))
    lane = gl.arange(0, BM, gl.SliceLayout(1, rows_layout))
    pair, place, is_row = lanes_of(ids, pairs, lane, expert, begin, count, rows, SLOTS, HAS_TABLE)
    x_at = rows_at(x, pair, place, x_stride, CHUNK * 128, rows_layout, SLOTS, GATED)
    for chunk in gl.static_range(STAGES - 1):
        copy_rows(shared_x.index(chunk), x_at, is_row, chunk * CHUNK, units, rows_layout)
    tile = gl.program_id(0) * TILES
    stage = 0
    # Of the chunk that is copied next: its tile's first words and scales, its first unit, the end of units.
    ahead = (STAGES - 1) * CHUNK
    end = units
    for index in range(TILES):
        total = gl.zeros([BN, BM], gl.float32, layout)
        for first in range(0, units, CHUNK):
            if TILES > 1:  # noqa: SIM102  a constant and a number
                if ahead >= units:
                    ahead = 0
                    words_at += next_words
                    above_at += next_words
                    fields_at += NEXT_FIELDS
                    if index == TILES - 1:
                        end = units * 0
            async_copy.wait_group(STAGES - 2)
            # All warps have left the stage of the chunk before this one.
            free = (stage + STAGES - 1) % STAGES
            copy_chunk(
                codes, above, fields, free, words_at, above_at, fields_at, copied_row, step, ahead, end,
                CHUNK, EVEN, FIELDS, KIND, ABOVE, BLOCK_WORDS,
            )  # fmt: skip
            copy_rows(shared_x.index(free), x_at, is_row, ahead, end, rows_layout)
            ahead += CHUNK
            total = add_chunk(
                codes, above, shared_x, fields, stage, in_block, total, units - first, layout, CHUNK, EVEN,
                WIDTH, FIELDS, KIND, PARTS,
            )  # fmt: skip
            stage = (stage + 1) % STAGES
        total = finish(total, scales, tile + index, n, units, layout, BN, FIELDS, KIND, GATED)
        store_pairs(
            total, out, ids, pairs, expert, begin, count, rows, n, tile + index, layout, SLOTS, HAS_TABLE, BM,
            BN, GATED,
        )  # fmt: skip
    async_copy.wait_group(0)


@gluon.jit
def copy_columns(to, at, is_row, first, end, layout: gl.constexpr):
    """Copy as many columns of rows as `to` holds, from `first` on; zeros from `end` on."""
    column = gl.arange(0, to.shape[1], gl.SliceLayout(0, layout))
    async_load(to, at + first, mask=is_row[:, None] & (column < end - first)[None, :])


@gluon.jit
def sum_plain(
    x, weight, ids, pairs, expert, begin, count, rows, n, tile, x_stride, width,
    layout: gl.constexpr, SLOTS: gl.constexpr, HAS_TABLE: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr, GATED: gl.constexpr,
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
    total, out, ids, pairs, expert, begin, count, rows, n, tile,
    layout: gl.constexpr, SLOTS: gl.constexpr, HAS_TABLE: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    GATED: gl.constexpr,
):  # fmt: skip
    """Store the sums [BN weight rows, BM pairs] in out [pairs, N]: GATED, silu(gate) * up as `plan` sorts the
    pairs, else in the pairs' own order."""
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


@gluon.jit
def store_plain(
    x, weight, out, ids, pairs, expert, begin, count, rows, n, x_stride, units,
    layout: gl.constexpr, SLOTS: gl.constexpr, HAS_TABLE: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    TILES: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Store the results of the program's tiles of a plain weight."""
    for index in range(TILES):
        tile = gl.program_id(0) * TILES + index
        total = sum_plain(
            x, weight, ids, pairs, expert, begin, count, rows, n, tile, x_stride, units * 128, layout, SLOTS,
            HAS_TABLE, BM, BN, STAGES, GATED,
        )  # fmt: skip
        store_pairs(
            total, out, ids, pairs, expert, begin, count, rows, n, tile, layout, SLOTS, HAS_TABLE, BM, BN,
            GATED,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["rows", "n", "units", "scale_words", "num_tiles"])
def gate_up_codes_kernel(
    x, gate_up, gate_up_scale, shared_gate_up, ids, tiles, pairs, hidden, rows, n, x_stride, units,
    scale_words, num_tiles,
    SLOTS: gl.constexpr, EXPERTS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, TILES: gl.constexpr,
    CHUNK: gl.constexpr, STAGES: gl.constexpr, PLAIN_STAGES: gl.constexpr, EVEN: gl.constexpr,
    KIND: gl.constexpr, WIDTH: gl.constexpr, FIELDS: gl.constexpr, ABOVE: gl.constexpr,
    BLOCK_WORDS: gl.constexpr, PARTS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """hidden[pair as `plan` sorts them] = silu(gate x) * up x of the pair's row of x.

    A program has TILES neighbouring tiles of BN weight rows; above one, N is a multiple of all. scale_words:
    32-bit words of an expert's scales. shared_gate_up: the plain weight of expert EXPERTS, None if it has
    codes. KIND to PARTS: the weight's LeftForm.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [gl.num_warps(), 1], [16, 8])
    HAS_TABLE: gl.constexpr = tiles is not None
    expert, begin, count, has_pairs = find_tile(ids, tiles, pairs, rows, num_tiles, layout, SLOTS, BM)
    if not has_pairs:
        return
    if shared_gate_up is not None and expert == EXPERTS:
        store_plain(
            x, shared_gate_up, hidden, ids, pairs, expert, begin, count, rows, n, x_stride, units, layout,
            SLOTS, HAS_TABLE, BM, BN, TILES, PLAIN_STAGES, True,
        )  # fmt: skip
        return
    started = start_codes(
        gate_up, gate_up_scale, expert, n, units, scale_words, BN, TILES, CHUNK, STAGES, EVEN, KIND, FIELDS,
        ABOVE, BLOCK_WORDS, True,
    )  # fmt: skip
    store_codes(
        x, started, hidden, ids, pairs, expert, begin, count, rows, n, x_stride, units, layout, SLOTS,
        HAS_TABLE, BM, BN, TILES, CHUNK, STAGES, EVEN, KIND, WIDTH, FIELDS, ABOVE, BLOCK_WORDS, PARTS, True,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["rows", "n", "units", "scale_words", "num_tiles"])
def down_codes_kernel(
    hidden, down, down_scale, shared_down, ids, tiles, pairs, results, rows, n, x_stride, units,
    scale_words, num_tiles,
    SLOTS: gl.constexpr, EXPERTS: gl.constexpr, EARLY: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    TILES: gl.constexpr, CHUNK: gl.constexpr, STAGES: gl.constexpr, PLAIN_STAGES: gl.constexpr,
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
        store_plain(
            hidden, shared_down, results, ids, pairs, expert, begin, count, rows, n, x_stride, units, layout,
            SLOTS, HAS_TABLE, BM, BN, TILES, PLAIN_STAGES, False,
        )  # fmt: skip
        return
    started = start_codes(
        down, down_scale, expert, n, units, scale_words, BN, TILES, CHUNK, STAGES, EVEN, KIND, FIELDS,
        ABOVE, BLOCK_WORDS, False,
    )  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    store_codes(
        hidden, started, results, ids, pairs, expert, begin, count, rows, n, x_stride, units, layout, SLOTS,
        HAS_TABLE, BM, BN, TILES, CHUNK, STAGES, EVEN, KIND, WIDTH, FIELDS, ABOVE, BLOCK_WORDS, PARTS, False,
    )  # fmt: skip
