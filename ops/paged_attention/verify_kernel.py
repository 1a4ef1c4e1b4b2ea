"""The verify route: attend to splits of the keys, cut at absolute positions, then combine their partials.

A row folds its splits in order. With few requests every split is an item of its own, and `combine_kernel`
folds them. With many, an item is all splits of a request up to the same one for all requests, which its
program folds in registers; only longer requests have more items (HAS_PREFIX). Both give the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_mtp.ops.paged_attention.attend_kernel import attend_range, attend_tile

# Sizes that differ from call to call: one binary serves them all, W = 1 included.
UNSPECIALIZED = (
    "query_len",
    "max_blocks",
    "first_key",
    "table_stride",
    "num_requests",
    "num_splits",
    "num_keys",
)
# A request that is longer than a prefix by at most this many keys stays whole: combining takes as long.
WHOLE_KEYS = tl.constexpr(224)
# Partials that combine_kernel loads at a time: splits, and what follows a prefix.
SPLIT_LOADS = 16
PREFIX_LOADS = 8


@triton.jit
def split_of(key):
    """Return the split that holds a key (SPLIT_SIZES in splits.py)."""
    split = tl.where(key < 4096, 16 + (key - 1024) // 128, 40 + (key - 4096) // 256)
    split = tl.where(key < 32768, split, 152 + (key - 32768) // 512)
    return tl.where(key < 1024, key // 64, split)


@triton.jit
def ends_split(key):
    """Return whether a split ends before a key (SPLIT_SIZES in splits.py)."""
    size = tl.where(key <= 4096, 128, tl.where(key <= 32768, 256, 512))
    return key % tl.where(key <= 1024, 64, size) == 0


@triton.jit
def split_begin(split):
    """Return the first key of a split."""
    key = tl.where(split < 40, 1024 + (split - 16) * 128, 4096 + (split - 40) * 256)
    key = tl.where(split < 152, key, 32768 + (split - 152) * 512)
    return tl.where(split < 16, split * 64, key)


@triton.jit
def find_prefix(last, first_key, num_items, num_programs, heads):
    """Return the end of the splits that an item takes together; no bit depends on it.

    last: each request's last key, below first_key without any; `heads` items per request take its keys. A
    prefix is whole requests if none of them is much longer than a program's share of all keys.
    """
    begin = split_begin(split_of(first_key))
    keys = tl.where(last >= first_key, last + 1 - begin, 0)
    total = tl.sum(keys.to(tl.int64), 0) * heads
    longest = tl.max(keys, 0)
    share = (total // num_programs).to(tl.int32)
    # A split that is an item of its own takes about twice as long as one in a prefix. With this prefix, the
    # programs of prefixes end when the others have taken all splits after them.
    fair = (2 * total // (num_programs + num_items)).to(tl.int32)
    # Items of several turns must be short, or the last one would keep all programs waiting.
    is_one_turn = num_items <= num_programs
    most = tl.where(is_one_turn, fair, share // 2)
    longest_whole = tl.where(is_one_turn, fair + WHOLE_KEYS, share + share // 4)
    cut = tl.maximum(split_of(begin + most), split_of(first_key) + 1)
    return tl.where(longest <= longest_whole, split_of(begin + longest) + 1, cut)


@triton.jit
def find_item(turn, ends, counts, requests, row_tiles, first_split, HKV: tl.constexpr):
    """Return request, split, kv head and row tile of the item that this program takes in a turn."""
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    # Late splits are the longest: hand them out first, and reverse the order of programs every turn.
    item = turn * num_programs + tl.where(turn % 2 == 0, program, num_programs - 1 - program)
    unit = tl.max(ends, 0) - 1 - item // (row_tiles * HKV)
    request = tl.sum((ends <= unit).to(tl.int32), 0)
    split = unit - tl.sum(tl.where(requests < request, counts, 0), 0) + first_split
    return request, split, item // row_tiles % HKV, item % row_tiles


@triton.jit
def fold_partial(acc, total, largest, part_acc, part_total, part_largest, ROWS: tl.constexpr = True):
    """Fold the partial of the next keys into the sums of an online softmax; the last axis of acc is the dims.
    ROWS: acc holds rows, whose maxima and totals are vectors; else one row, whose two are numbers.

    A partial without keys changes nothing, not even the sign of a zero: rows of one tile see different ones.
    """
    new_largest = tl.maximum(largest, part_largest)
    base = tl.where(new_largest == -float("inf"), 0.0, new_largest)
    factor = tl.exp2(largest - base)
    weight = tl.exp2(part_largest - base)
    is_part = part_largest > -float("inf")
    new_total = tl.where(is_part, total * factor + part_total * weight, total)
    if ROWS:
        factor, weight, is_part = factor[:, None], weight[:, None], is_part[:, None]
    return tl.where(is_part, acc * factor + part_acc * weight, acc), new_total, new_largest


@triton.jit
def attend_splits(
    queries,
    cache,
    scales,
    table,
    begin,
    end,
    seen_by_all,
    row_position,
    first_key,
    max_blocks,
    block_size,
    block_stride,
    half_stride,
    token_stride,
    scale_block_stride,
    scale_half_stride,
    scale_log2,
    BM: tl.constexpr,
    HD: tl.constexpr,
    BN: tl.constexpr,
    IN_ONE_BLOCK: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    TAIL_STAGES: tl.constexpr,
    LOAD_FIRST: tl.constexpr,
):
    """Return sums, maxima and totals of BM rows over keys begin .. end - 1, folded split by split in order.

    begin: the first key of a split. seen_by_all: every row sees the keys below it.
    """
    if HAS_SCALE and queries.dtype == tl.bfloat16:
        # float16 holds every e4m3 value. It converts two of them in one instruction, bfloat16 in four.
        queries = queries.to(tl.float16)
    sums = tl.zeros((BM, HD), tl.float32)
    sums_total = tl.zeros((BM,), tl.float32)
    sums_largest = tl.full((BM,), -float("inf"), tl.float32)
    acc = tl.zeros((BM, HD), tl.float32)
    largest = tl.full((BM,), -float("inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    # Count loops from 0 and make `begin` a visible multiple of BN: otherwise the compiler does not see that
    # offsets are aligned, and neither widens nor pipelines the loads.
    begin = begin // BN * BN
    # Tiles that every row sees whole need no mask per row. One loop covers all splits: a loop per split would
    # drain its pipeline between them.
    num_whole = tl.maximum(tl.minimum(end, seen_by_all) - begin, 0) // BN
    for i in tl.range(0, num_whole, disable_licm=True):
        acc, largest, total = attend_tile(
            acc, largest, total, queries, cache, scales, table, begin + i * BN, row_position, end, first_key,
            max_blocks, block_size, block_stride, half_stride, token_stride, scale_block_stride,
            scale_half_stride, scale_log2, HD, BN, IN_ONE_BLOCK, HAS_SCALE, False, False,
        )  # fmt: skip
        if ends_split(begin + (i + 1) * BN):
            sums, sums_total, sums_largest = fold_partial(sums, sums_total, sums_largest, acc, total, largest)
            acc = tl.zeros((BM, HD), tl.float32)
            largest = tl.full((BM,), -float("inf"), tl.float32)
            total = tl.zeros((BM,), tl.float32)
    num_tiles = tl.cdiv(tl.maximum(end - begin, 0), BN)
    for i in tl.range(num_whole, num_tiles, num_stages=TAIL_STAGES, disable_licm=True):
        acc, largest, total = attend_tile(
            acc, largest, total, queries, cache, scales, table, begin + i * BN, row_position, end, first_key,
            max_blocks, block_size, block_stride, half_stride, token_stride, scale_block_stride,
            scale_half_stride, scale_log2, HD, BN, IN_ONE_BLOCK, HAS_SCALE, True, LOAD_FIRST,
        )  # fmt: skip
        if ends_split(begin + (i + 1) * BN):
            sums, sums_total, sums_largest = fold_partial(sums, sums_total, sums_largest, acc, total, largest)
            acc = tl.zeros((BM, HD), tl.float32)
            largest = tl.full((BM,), -float("inf"), tl.float32)
            total = tl.zeros((BM,), tl.float32)
    # Fold the last split, which may be incomplete.
    sums, sums_total, sums_largest = fold_partial(sums, sums_total, sums_largest, acc, total, largest)
    return sums, sums_largest, sums_total


@triton.jit
def attend_item(
    q, kv, kv_scale, block_table, positions, request, last, lowest, split, split_end, kv_head, row_tile,
    q_row_stride, q_head_stride, block_stride, half_stride, head_stride, token_stride, scale_block_stride,
    scale_half_stride, scale_head_stride, table_stride, query_len, max_blocks, first_key, scale_log2,
    GROUP: tl.constexpr, HD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HAS_PREFIX: tl.constexpr, BLOCK_SIZE: tl.constexpr, HAS_SCALE: tl.constexpr, TAIL_STAGES: tl.constexpr,
):  # fmt: skip
    """Return sums, maxima and totals of BM rows over a request's splits split .. split_end - 1.

    last: the request's last key; lowest: the lowest position of its rows.
    """
    end = tl.minimum(last + 1, split_begin(split_end))
    seen_by_all = lowest + 1
    row = row_tile * BM + tl.arange(0, BM)
    token = row // GROUP
    is_row = token < query_len
    token = request.to(tl.int64) * query_len + token
    head = kv_head * GROUP + row % GROUP
    at = token * q_row_stride + head * q_head_stride
    queries = tl.load(q + at[:, None] + tl.arange(0, HD)[None, :], mask=is_row[:, None], other=0.0)
    row_position = tl.load(positions + token, mask=is_row, other=-1).to(tl.int32)
    cache = kv + kv_head.to(tl.int64) * head_stride
    scales = kv_scale + kv_head.to(tl.int64) * scale_head_stride
    table = block_table + request.to(tl.int64) * table_stride
    begin = split_begin(split)
    if HAS_PREFIX:
        sums, largest, total = attend_splits(
            queries, cache, scales, table, begin, end, seen_by_all, row_position, first_key, max_blocks,
            BLOCK_SIZE, block_stride, half_stride, token_stride, scale_block_stride, scale_half_stride,
            scale_log2, BM, HD, BN, BLOCK_SIZE % BN == 0, HAS_SCALE, TAIL_STAGES, TAIL_STAGES == 1,
        )  # fmt: skip
    else:
        sums, largest, total = attend_range(
            queries, cache, scales, table, begin, end, seen_by_all, row_position, first_key, max_blocks,
            BLOCK_SIZE, block_stride, half_stride, token_stride, scale_block_stride, scale_half_stride,
            scale_log2, BM, HD, BN, BLOCK_SIZE % BN == 0, HAS_SCALE, TAIL_STAGES, TAIL_STAGES == 1,
        )  # fmt: skip
    return sums, largest, total


@triton.jit
def store_partial(
    part_sum, part_largest, part_total, sums, largest, total, place, kv_head, row_tile, query_len,
    HKV: tl.constexpr, GROUP: tl.constexpr, HD: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Store an item's results as partial `place`."""
    # Rows of an item are contiguous: one address and constant offsets.
    at = (place * HKV + kv_head) * query_len * GROUP + row_tile * BM
    row = tl.arange(0, BM)
    is_row = row < query_len * GROUP - row_tile * BM
    at_sum = part_sum + at * HD + row[:, None] * HD + tl.arange(0, HD)[None, :]
    tl.store(at_sum, sums, mask=is_row[:, None])
    tl.store(part_largest + at + row, largest, mask=is_row)
    tl.store(part_total + at + row, total, mask=is_row)


@triton.jit
def store_result(
    gate, out, sums, total, request, kv_head, row_tile, gate_row_stride, gate_head_stride, query_len,
    HKV: tl.constexpr, GROUP: tl.constexpr, HD: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Store the results of an item that holds all keys, as `combine_kernel` does."""
    row = row_tile * BM + tl.arange(0, BM)
    token = row // GROUP
    is_row = token < query_len
    token = request.to(tl.int64) * query_len + token
    head = kv_head * GROUP + row % GROUP
    dim = tl.arange(0, HD)
    at = gate + (token * gate_row_stride + head * gate_head_stride)[:, None] + dim[None, :]
    g = tl.load(at, mask=is_row[:, None], other=0.0).to(tl.float32)
    value = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    value = value * (1.0 / (1.0 + tl.exp(-g)))
    at = out + ((token * (HKV * GROUP) + head) * HD)[:, None] + dim[None, :]
    tl.store(at, value.to(out.dtype.element_ty), mask=is_row[:, None])


@triton.jit(do_not_specialize=UNSPECIALIZED)
def verify_kernel(
    q,
    gate,
    kv,
    kv_scale,
    block_table,
    positions,
    out,
    part_sum,
    part_largest,
    part_total,
    places,
    counter,
    q_row_stride,
    q_head_stride,
    gate_row_stride,
    gate_head_stride,
    block_stride,
    half_stride,
    head_stride,
    token_stride,
    scale_block_stride,
    scale_half_stride,
    scale_head_stride,
    table_stride,
    num_requests,
    query_len,
    max_blocks,
    num_splits,
    first_key,
    scale_log2,
    HKV: tl.constexpr,
    GROUP: tl.constexpr,
    HD: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    MAX_REQUESTS: tl.constexpr,
    MAX_WINDOW: tl.constexpr,
    HAS_PREFIX: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    TAIL_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend to items (request, partial, kv head, BM rows); a program takes one item per turn.

    A partial covers one split of the keys or, with HAS_PREFIX, a request's first splits. A request whose keys
    are one prefix gets its results here, gate included.

    places: with HAS_PREFIX, where the partials of a request after its prefix begin, -1 for a request that has
    its results; then the prefix's end. counter: zero, and zero again after the launch.
    """
    # The items follow from the positions: find them while earlier kernels still write the queries.
    if PDL:
        gdc_launch_dependents()
    requests = tl.arange(0, MAX_REQUESTS)
    is_request = requests < num_requests
    # One vector per window row, not one tile: a vector lies in one warp, so its sums need no other warp.
    last = tl.full((MAX_REQUESTS,), -1, tl.int32)
    lowest = tl.full((MAX_REQUESTS,), 2147483646, tl.int32)
    for step in tl.static_range(MAX_WINDOW):
        is_step = is_request & (tl.zeros_like(requests) + step < query_len)
        position = tl.load(positions + requests * query_len + step, mask=is_step, other=-1).to(tl.int32)
        last = tl.maximum(last, position)
        lowest = tl.minimum(lowest, tl.where(is_step, position, 2147483646))
    last_key = max_blocks * BLOCK_SIZE - 1
    last = tl.minimum(last, last_key)
    first_split = split_of(first_key)
    counts = tl.where(last >= first_key, split_of(last) + 1 - first_split, 0)
    row_tiles = tl.cdiv(query_len * GROUP, BM)
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    if HAS_PREFIX:
        heads = row_tiles * HKV
        num_prefixes = num_requests * heads
        prefix_end = find_prefix(last, first_key, num_prefixes, num_programs, heads)
        # Partials after the prefix.
        counts = tl.maximum(counts - (prefix_end - first_split), 0)
        ends = tl.cumsum(counts, 0)
        num_items = num_prefixes + tl.max(ends, 0) * heads
        if PDL:
            gdc_wait()
        is_first_program = tl.zeros_like(requests) + program == 0
        place = tl.where(counts > 0, num_requests + ends - counts, -1)
        tl.store(places + requests, place, mask=is_request & is_first_program)
        if program == 0:
            tl.store(places + num_requests, prefix_end)
        item = program
        while item < num_items:
            # Prefixes are the longest items: they come first.
            unit = item // heads
            is_prefix = unit < num_requests
            request = tl.sum((ends <= unit - num_requests).to(tl.int32), 0)
            request = tl.where(is_prefix, unit, request)
            split = prefix_end + unit - num_requests - tl.sum(tl.where(requests < request, counts, 0), 0)
            split = tl.where(is_prefix, first_split, split)
            kv_head = item // row_tiles % HKV
            row_tile = item % row_tiles
            # The vectors of all requests would take longer to search than these rows to load.
            window = tl.arange(0, MAX_WINDOW)
            at = positions + request.to(tl.int64) * query_len + window
            own_position = tl.load(at, mask=window < query_len, other=-1).to(tl.int32)
            sums, largest, total = attend_item(
                q, kv, kv_scale, block_table, positions, request,
                tl.minimum(tl.max(own_position, 0), last_key),
                tl.min(tl.where(window < query_len, own_position, 2147483646), 0), split,
                tl.where(is_prefix, prefix_end, split + 1), kv_head, row_tile, q_row_stride, q_head_stride,
                block_stride, half_stride, head_stride, token_stride, scale_block_stride, scale_half_stride,
                scale_head_stride, table_stride, query_len, max_blocks, first_key, scale_log2,
                GROUP, HD, BM, BN, HAS_PREFIX, BLOCK_SIZE, HAS_SCALE, TAIL_STAGES,
            )  # fmt: skip
            if tl.sum(tl.where(requests == request, counts, 0), 0) == 0:
                store_result(
                    gate, out, sums, total, request, kv_head, row_tile, gate_row_stride, gate_head_stride,
                    query_len, HKV, GROUP, HD, BM,
                )  # fmt: skip
            else:
                store_partial(
                    part_sum, part_largest, part_total, sums, largest, total, unit.to(tl.int64), kv_head,
                    row_tile, query_len, HKV, GROUP, HD, BM,
                )  # fmt: skip
            # Lengths differ: a program takes its next item when it has finished one.
            taken = tl.atomic_add(counter, 1, sem="relaxed")
            if taken == num_items - 1:
                # There are as many additions as items: this is the last one.
                tl.store(counter, 0)
            item = num_programs + taken
    else:
        ends = tl.cumsum(counts, 0)
        num_items = tl.max(ends, 0) * row_tiles * HKV
        turns = num_items // num_programs
        last_place = tl.where(turns % 2 == 0, program, num_programs - 1 - program)
        turns += (last_place < num_items % num_programs).to(tl.int32)
        if PDL:
            gdc_wait()
        for turn in tl.range(0, turns, num_stages=1, disable_licm=True):
            request, split, kv_head, row_tile = find_item(
                turn, ends, counts, requests, row_tiles, first_split, HKV
            )
            own = requests == request
            sums, largest, total = attend_item(
                q, kv, kv_scale, block_table, positions, request, tl.sum(tl.where(own, last, 0), 0),
                tl.sum(tl.where(own, lowest, 0), 0), split, split + 1, kv_head, row_tile, q_row_stride,
                q_head_stride, block_stride, half_stride, head_stride, token_stride, scale_block_stride,
                scale_half_stride, scale_head_stride, table_stride, query_len, max_blocks, first_key,
                scale_log2, GROUP, HD, BM, BN, HAS_PREFIX, BLOCK_SIZE, HAS_SCALE, TAIL_STAGES,
            )  # fmt: skip
            store_partial(
                part_sum, part_largest, part_total, sums, largest, total,
                request.to(tl.int64) * num_splits + split, kv_head, row_tile, query_len, HKV, GROUP, HD, BM,
            )  # fmt: skip


@triton.jit
def load_partials(
    part_sum, part_largest, part_total, first, following, step, start, last, dim,
    HD: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Load sums [BD], maxima and totals of partials start .. start + COUNT - 1 of a row, as a tuple.

    first, following: entries of partial 0 and of partial 1; the others lie `step` entries apart. A partial
    beyond `last` loads `last`: masks would make the compiler wait for each load before it issues the next.
    Maxima and totals are numbers: for vectors Triton would choose layouts for minutes.
    """
    loaded = ()
    for index in tl.static_range(COUNT):
        partial = tl.minimum(start + index, last)
        at = tl.where(partial == 0, first, following + (partial - 1) * step)
        sums = tl.load(part_sum + at * HD + dim)
        loaded += ((sums, tl.load(part_largest + at), tl.load(part_total + at)),)
    return loaded


@triton.jit
def fold_loaded(acc, denominator, largest, loaded, start, count, COUNT: tl.constexpr):
    """Fold the loaded partials start .. start + COUNT - 1, of which `count` exist, in order."""
    for index in tl.static_range(COUNT):
        part_largest = tl.where(start + index < count, loaded[index][1], -float("inf"))
        acc, denominator, largest = fold_partial(
            acc, denominator, largest, loaded[index][0], loaded[index][2], part_largest, False
        )
    return acc, denominator, largest


@triton.jit
def combine_row(
    part_sum, part_largest, part_total, gate, out, first, following, step, count, dim,
    HD: tl.constexpr, BD: tl.constexpr, LOADS: tl.constexpr,
):  # fmt: skip
    """Fold the dims `dim` of one head of one row over its `count` partials in order, and apply the gate.

    gate, out: those of this head and row.
    """
    last_partial = tl.maximum(count - 1, 0)
    loaded = load_partials(
        part_sum, part_largest, part_total, first, following, step, 0, last_partial, dim, HD, LOADS
    )
    g = tl.load(gate + dim).to(tl.float32)
    acc = tl.zeros((BD,), tl.float32)
    denominator = tl.zeros((), tl.float32)
    largest = tl.full((), -float("inf"), tl.float32)
    acc, denominator, largest = fold_loaded(acc, denominator, largest, loaded, 0, count, LOADS)
    if count > LOADS:
        loaded = load_partials(
            part_sum, part_largest, part_total, first, following, step, LOADS, last_partial, dim, HD, LOADS
        )
        for start in range(LOADS, count, LOADS):
            # Load one step ahead: even a long context waits for memory only once.
            later = load_partials(
                part_sum, part_largest, part_total, first, following, step, start + LOADS, last_partial, dim,
                HD, LOADS,
            )  # fmt: skip
            acc, denominator, largest = fold_loaded(acc, denominator, largest, loaded, start, count, LOADS)
            loaded = later
    value = acc / tl.where(denominator == 0.0, 1.0, denominator)
    value = value * (1.0 / (1.0 + tl.exp(-g)))
    tl.store(out + dim, value.to(out.dtype.element_ty))


@triton.jit(do_not_specialize=UNSPECIALIZED)
def combine_kernel(
    part_sum,
    part_largest,
    part_total,
    places,
    gate,
    positions,
    out,
    gate_row_stride,
    gate_head_stride,
    num_requests,
    query_len,
    num_splits,
    num_keys,
    first_key,
    HKV: tl.constexpr,
    GROUP: tl.constexpr,
    HD: tl.constexpr,
    BD: tl.constexpr,
    MAX_REQUESTS: tl.constexpr,
    HAS_PREFIX: tl.constexpr,
    LOADS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Combine the partials of each head and row, BD dims a program.

    With HAS_PREFIX a program takes heads and rows in turn, only of requests with partials: often there are
    none, and always few if one program each would take long to start.
    """
    if PDL:
        gdc_launch_dependents()
    # An entry of each partial; the next partial's lies `step` entries later.
    step = HKV * query_len * GROUP
    dim = tl.program_id(1) * BD + tl.arange(0, BD)
    if HAS_PREFIX:
        requests = tl.arange(0, MAX_REQUESTS)
        if PDL:
            gdc_wait()
        place = tl.load(places + requests, mask=requests < num_requests, other=-1)
        prefix_end = tl.load(places + num_requests)
        ends = tl.cumsum((place >= 0).to(tl.int32), 0)
        for item in range(tl.program_id(0), tl.max(ends, 0) * step, tl.num_programs(0)):
            request = tl.sum((ends <= item // step).to(tl.int32), 0)
            following = tl.sum(tl.where(requests == request, place, 0), 0).to(tl.int64)
            entry = item % step
            row = request.to(tl.int64) * query_len + entry % (query_len * GROUP) // GROUP
            head = entry // (query_len * GROUP) * GROUP + entry % GROUP
            last = tl.minimum(tl.load(positions + row), num_keys - 1).to(tl.int32)
            end = tl.where(last >= first_key, split_of(last) + 1, 0)
            count = tl.where(end > 0, 1 + tl.maximum(end - prefix_end, 0), 0)
            combine_row(
                part_sum, part_largest, part_total, gate + row * gate_row_stride + head * gate_head_stride,
                out + (row * (HKV * GROUP) + head) * HD, entry + request.to(tl.int64) * step,
                entry + following * step, step, count, dim, HD, BD, LOADS,
            )  # fmt: skip
    else:
        item = tl.program_id(0).to(tl.int64)
        row = item // (HKV * GROUP)
        head = item % (HKV * GROUP)
        # Positions may be read before the wait (reference.py).
        last = tl.minimum(tl.load(positions + row), num_keys - 1).to(tl.int32)
        first_split = split_of(first_key)
        end = tl.where(last >= first_key, split_of(last) + 1, 0)
        if PDL:
            gdc_wait()
        entry = head // GROUP * query_len * GROUP + row % query_len * GROUP + head % GROUP
        first = entry + (row // query_len * num_splits + first_split) * step
        combine_row(
            part_sum, part_largest, part_total, gate + row * gate_row_stride + head * gate_head_stride,
            out + item * HD, first, first + step, step, tl.maximum(end - first_split, 0), dim, HD, BD, LOADS,
        )  # fmt: skip
