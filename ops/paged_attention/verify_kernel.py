"""The verify route: attend to splits of the keys, cut at absolute positions, then combine their partials.

GROUP_SPLITS splits form a group, whose sums are folded in split order: in the registers of one program if the
groups keep the GPU busy, else when the partials are combined. Both give the same bits. For few requests the
kernels are compiled without groups (HAS_GROUPS), which is faster at long contexts.
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
    "num_programs",
    "num_requests",
    "num_splits",
    "num_keys",
)
# Groups of splits that combine_kernel loads first, however many there are, and then per step.
FIRST_GROUPS = 4
NEXT_GROUPS = 8


@triton.jit
def split_of(key):
    """Return the split that holds a key (SPLIT_SIZES in splits.py)."""
    split = tl.where(key < 4096, 16 + (key - 1024) // 128, 40 + (key - 4096) // 256)
    split = tl.where(key < 32768, split, 152 + (key - 32768) // 512)
    return tl.where(key < 1024, key // 64, split)


@triton.jit
def split_begin(split):
    """Return the first key of a split."""
    key = tl.where(split < 40, 1024 + (split - 16) * 128, 4096 + (split - 40) * 256)
    key = tl.where(split < 152, key, 32768 + (split - 152) * 512)
    return tl.where(split < 16, split * 64, key)


@triton.jit
def splits_an_item(
    positions, num_requests, query_len, last_key, first_key, num_programs,
    HKV: tl.constexpr, MAX_REQUESTS: tl.constexpr, GROUP_SPLITS: tl.constexpr,
):  # fmt: skip
    """Return GROUP_SPLITS if items of a whole group keep all programs busy, else 1; no bit depends on it.

    Both kernels call this with the same positions, so that they agree.
    """
    request = tl.arange(0, MAX_REQUESTS)
    at = positions + request * query_len + query_len - 1
    last = tl.load(at, mask=request < num_requests, other=-1).to(tl.int32)
    last = tl.minimum(last, last_key)
    # Groups are used while the longest item has at most twice the keys that each program has to read.
    num_keys = tl.sum(tl.where(last >= first_key, last + 1 - first_key, 0), 0)
    longest = tl.maximum(tl.max(last, 0), 0)
    group = split_of(longest) // GROUP_SPLITS * GROUP_SPLITS
    most_keys = tl.minimum(split_begin(group + GROUP_SPLITS) - split_begin(group), longest + 1)
    return tl.where(2 * HKV * num_keys >= num_programs * most_keys, GROUP_SPLITS, 1)


@triton.jit
def find_item(turn, ends, counts, requests, row_tiles, first_unit, HKV: tl.constexpr):
    """Return request, partial, kv head, row tile and unit of the item that this program takes in a turn.

    Units count the partials of all requests, one request after another.
    """
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    # Late partials are the longest: hand them out first, and reverse the order of programs every turn.
    item = turn * num_programs + tl.where(turn % 2 == 0, program, num_programs - 1 - program)
    unit = tl.max(ends, 0) - 1 - item // (row_tiles * HKV)
    request = tl.sum((ends <= unit).to(tl.int32), 0)
    partial = unit - tl.sum(tl.where(requests < request, counts, 0), 0) + first_unit
    return request, partial, item // row_tiles % HKV, item % row_tiles, unit


@triton.jit
def fold_partial(acc, total, largest, part_acc, part_total, part_largest):
    """Fold the partial of the next keys into the sums of an online softmax; the last axis of acc is the dims.

    A partial without keys changes nothing, not even the sign of a zero: rows of one tile see different ones.
    """
    new_largest = tl.maximum(largest, part_largest)
    base = tl.where(new_largest == -float("inf"), 0.0, new_largest)
    factor = tl.exp2(largest - base)
    weight = tl.exp2(part_largest - base)
    is_part = part_largest > -float("inf")
    new_acc = acc * factor[:, None] + part_acc * weight[:, None]
    new_total = total * factor + part_total * weight
    return tl.where(is_part[:, None], new_acc, acc), tl.where(is_part, new_total, total), new_largest


@triton.jit
def attend_splits(
    queries,
    cache,
    scales,
    table,
    begin,
    end,
    split_size,
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

    begin: the first key of a split of `split_size` keys. seen_by_all: every row sees the keys below it.
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
        if ((i + 1) * BN) % split_size == 0:
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
        if ((i + 1) * BN) % split_size == 0:
            sums, sums_total, sums_largest = fold_partial(sums, sums_total, sums_largest, acc, total, largest)
            acc = tl.zeros((BM, HD), tl.float32)
            largest = tl.full((BM,), -float("inf"), tl.float32)
            total = tl.zeros((BM,), tl.float32)
    # Fold the last split, which may be incomplete.
    sums, sums_total, sums_largest = fold_partial(sums, sums_total, sums_largest, acc, total, largest)
    return sums, sums_largest, sums_total


@triton.jit(do_not_specialize=UNSPECIALIZED)
def verify_kernel(
    q,
    kv,
    kv_scale,
    block_table,
    positions,
    part_sum,
    part_largest,
    part_total,
    first_partials,
    q_row_stride,
    q_head_stride,
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
    GROUP_SPLITS: tl.constexpr,
    HAS_GROUPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    TAIL_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend to items (request, partial, kv head, BM rows); a program takes one item per turn.

    A partial covers one split of the keys or, with HAS_GROUPS and enough items, a group of splits.
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
    size = 1
    if HAS_GROUPS:
        size = splits_an_item(
            positions, num_requests, query_len, last_key, first_key, tl.num_programs(0),
            HKV, MAX_REQUESTS, GROUP_SPLITS,
        )  # fmt: skip
    first_split = split_of(first_key)
    first_partial = first_split // size
    counts = tl.where(last >= first_key, split_of(last) // size + 1 - first_partial, 0)
    ends = tl.cumsum(counts, 0)
    row_tiles = tl.cdiv(query_len * GROUP, BM)
    num_items = tl.max(ends, 0) * row_tiles * HKV
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    turns = num_items // num_programs
    last_place = tl.where(turns % 2 == 0, program, num_programs - 1 - program)
    turns += (last_place < num_items % num_programs).to(tl.int32)
    if PDL:
        gdc_wait()
    if HAS_GROUPS:
        # A request's partial p lies at first_partials + p. Partials below the first key have room too.
        first = ends - counts + first_partial * requests
        is_first_program = tl.zeros_like(requests) + program == 0
        tl.store(first_partials + requests, first, mask=is_request & is_first_program)
    for turn in tl.range(0, turns, num_stages=1, disable_licm=True):
        request, partial, kv_head, row_tile, unit = find_item(
            turn, ends, counts, requests, row_tiles, first_partial, HKV
        )
        is_request = requests == request
        end = tl.sum(tl.where(is_request, last, 0), 0) + 1
        seen_by_all = tl.sum(tl.where(is_request, lowest, 0), 0) + 1
        # All splits of a group have the same size.
        split = tl.maximum(partial * size, first_split)
        begin = split_begin(split)
        table = block_table + request.to(tl.int64) * table_stride
        row = row_tile * BM + tl.arange(0, BM)
        token = row // GROUP
        is_row = token < query_len
        token = request.to(tl.int64) * query_len + token
        head = kv_head * GROUP + row % GROUP
        dim = tl.arange(0, HD)
        at = token * q_row_stride + head * q_head_stride
        queries = tl.load(q + at[:, None] + dim[None, :], mask=is_row[:, None], other=0.0)
        row_position = tl.load(positions + token, mask=is_row, other=-1).to(tl.int32)
        cache = kv + kv_head.to(tl.int64) * head_stride
        scales = kv_scale + kv_head.to(tl.int64) * scale_head_stride
        end = tl.minimum(end, split_begin((partial + 1) * size))
        if HAS_GROUPS:
            sums, largest, total = attend_splits(
                queries, cache, scales, table, begin, end, split_begin(split + 1) - begin, seen_by_all,
                row_position, first_key, max_blocks, BLOCK_SIZE, block_stride, half_stride, token_stride,
                scale_block_stride, scale_half_stride, scale_log2, BM, HD, BN, BLOCK_SIZE % BN == 0,
                HAS_SCALE, TAIL_STAGES, TAIL_STAGES == 1,
            )  # fmt: skip
        else:
            sums, largest, total = attend_range(
                queries, cache, scales, table, begin, end, seen_by_all,
                row_position, first_key, max_blocks, BLOCK_SIZE, block_stride, half_stride, token_stride,
                scale_block_stride, scale_half_stride, scale_log2, BM, HD, BN, BLOCK_SIZE % BN == 0,
                HAS_SCALE, TAIL_STAGES, TAIL_STAGES == 1,
            )  # fmt: skip
        # Rows of an item are contiguous: one address and constant offsets.
        place = request.to(tl.int64) * num_splits + partial
        if HAS_GROUPS:
            place = unit.to(tl.int64) + first_partial * (request + 1)
        at = (place * HKV + kv_head) * query_len * GROUP + row_tile * BM
        row = tl.arange(0, BM)
        is_row = row < query_len * GROUP - row_tile * BM
        tl.store(part_sum + at * HD + row[:, None] * HD + dim[None, :], sums, mask=is_row[:, None])
        tl.store(part_largest + at + row, largest, mask=is_row)
        tl.store(part_total + at + row, total, mask=is_row)


@triton.jit
def load_partials(part_sum, part_largest, part_total, partial, step, index, last, dim, HD: tl.constexpr):
    """Load sums, maxima and totals of the partials `index` of a row; an index beyond `last` loads `last`.

    Masks would make the compiler wait for each load before it issues the next.
    """
    at = partial + tl.minimum(index, last) * step
    sums = tl.load(part_sum + at[:, None] * HD + dim[None, :])
    return sums, tl.load(part_largest + at), tl.load(part_total + at)


@triton.jit
def load_splits(
    part_sum, part_largest, part_total, partial, step, start, last, dim,
    HD: tl.constexpr, GROUPS: tl.constexpr, GROUP_SPLITS: tl.constexpr,
):  # fmt: skip
    """Load the partials of groups start .. start + GROUPS - 1; tuple i holds split i of every group."""
    loaded = ()
    for index in tl.static_range(GROUP_SPLITS):
        split = (start + tl.arange(0, GROUPS)) * GROUP_SPLITS + index
        loaded += (load_partials(part_sum, part_largest, part_total, partial, step, split, last, dim, HD),)
    return loaded


@triton.jit
def fold_splits(
    loaded, start, begin, end, BD: tl.constexpr, GROUPS: tl.constexpr, GROUP_SPLITS: tl.constexpr
):
    """Return sums [GROUPS, BD], totals and maxima of groups from the loaded splits in begin .. end - 1."""
    sums = tl.zeros((GROUPS, BD), tl.float32)
    total = tl.zeros((GROUPS,), tl.float32)
    largest = tl.full((GROUPS,), -float("inf"), tl.float32)
    for index in tl.static_range(GROUP_SPLITS):
        split = (start + tl.arange(0, GROUPS)) * GROUP_SPLITS + index
        split_largest = tl.where((split >= begin) & (split < end), loaded[index][1], -float("inf"))
        sums, total, largest = fold_partial(
            sums, total, largest, loaded[index][0], loaded[index][2], split_largest
        )
    return sums, total, largest


@triton.jit
def load_groups(
    part_sum, part_largest, part_total, partial, step, size, start, begin, end, last, dim,
    HD: tl.constexpr, BD: tl.constexpr, GROUPS: tl.constexpr, GROUP_SPLITS: tl.constexpr,
):  # fmt: skip
    """Load sums [GROUPS, BD], totals and maxima of groups start .. start + GROUPS - 1 of a row.

    size: splits per partial. Only splits begin .. end - 1 count.
    """
    if size == GROUP_SPLITS:
        group = start + tl.arange(0, GROUPS)
        sums, largest, total = load_partials(
            part_sum, part_largest, part_total, partial, step, group, last, dim, HD
        )
        is_group = (group >= begin // GROUP_SPLITS) & (group * GROUP_SPLITS < end)
        largest = tl.where(is_group, largest, -float("inf"))
    else:
        loaded = load_splits(
            part_sum, part_largest, part_total, partial, step, start, last, dim, HD, GROUPS, GROUP_SPLITS
        )
        sums, total, largest = fold_splits(loaded, start, begin, end, BD, GROUPS, GROUP_SPLITS)
    return sums, total, largest


@triton.jit
def add_groups(acc, denominator, largest, sums, total, group_largest):
    """Add the sums [GROUPS, BD] of the next groups of a row to the sums so far."""
    is_group = group_largest > -float("inf")
    total = tl.where(is_group, total, 0.0)
    sums = tl.where(is_group[:, None], sums, 0.0)
    new_largest = tl.maximum(largest, tl.max(group_largest, 0))
    base = tl.where(new_largest == -float("inf"), 0.0, new_largest)
    weight = tl.exp2(group_largest - base)
    factor = tl.exp2(largest - base)
    acc = acc * factor + tl.sum(sums * weight[:, None], 0)
    denominator = denominator * factor + tl.sum(total * weight, 0)
    return acc, denominator, new_largest


@triton.jit(do_not_specialize=UNSPECIALIZED)
def combine_kernel(
    part_sum,
    part_largest,
    part_total,
    first_partials,
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
    num_programs,
    HKV: tl.constexpr,
    GROUP: tl.constexpr,
    HD: tl.constexpr,
    BD: tl.constexpr,
    MAX_REQUESTS: tl.constexpr,
    GROUP_SPLITS: tl.constexpr,
    HAS_GROUPS: tl.constexpr,
    FIRST_GROUPS: tl.constexpr,
    NEXT_GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sum BD dims of one head of one row over its groups of splits in order, and apply the gate."""
    if PDL:
        gdc_launch_dependents()
    item = tl.program_id(0).to(tl.int64)
    row = item // (HKV * GROUP)
    head = item % (HKV * GROUP)
    dim = tl.program_id(1) * BD + tl.arange(0, BD)
    # The first partial of this row; the next one lies `step` entries later.
    step = HKV * query_len * GROUP
    partial = head // GROUP * query_len * GROUP + row % query_len * GROUP + head % GROUP
    # Positions may be read before the wait (reference.py).
    last = tl.minimum(tl.load(positions + row), num_keys - 1).to(tl.int32)
    begin = split_of(first_key)
    end = tl.where(last >= first_key, split_of(last) + 1, 0)
    last_partial = tl.maximum(end - 1, 0)
    num_groups = tl.cdiv(end, GROUP_SPLITS)
    acc = tl.zeros((BD,), tl.float32)
    gate_at = gate + row * gate_row_stride + head * gate_head_stride + dim
    if HAS_GROUPS:
        size = splits_an_item(
            positions, num_requests, query_len, num_keys - 1, first_key, num_programs,
            HKV, MAX_REQUESTS, GROUP_SPLITS,
        )  # fmt: skip
        last_partial = last_partial // size
        if PDL:
            gdc_wait()
        partial += tl.load(first_partials + row // query_len).to(tl.int64) * step
        g = tl.load(gate_at).to(tl.float32)
        sums, total, group_largest = load_groups(
            part_sum, part_largest, part_total, partial, step, size, 0, begin, end, last_partial, dim,
            HD, BD, FIRST_GROUPS, GROUP_SPLITS,
        )  # fmt: skip
        acc, denominator, largest = add_groups(acc, 0.0, -float("inf"), sums, total, group_largest)
        for start in range(FIRST_GROUPS, num_groups, NEXT_GROUPS):
            next_sums, next_total, next_largest = load_groups(
                part_sum, part_largest, part_total, partial, step, size, start, begin, end, last_partial, dim,
                HD, BD, NEXT_GROUPS, GROUP_SPLITS,
            )  # fmt: skip
            acc, denominator, largest = add_groups(
                acc, denominator, largest, next_sums, next_total, next_largest
            )
    else:
        if PDL:
            gdc_wait()
        partial += row // query_len * num_splits * step
        first = load_splits(
            part_sum,
            part_largest,
            part_total,
            partial,
            step,
            0,
            last_partial,
            dim,
            HD,
            FIRST_GROUPS,
            GROUP_SPLITS,
        )
        g = tl.load(gate_at).to(tl.float32)
        sums, total, group_largest = fold_splits(first, 0, begin, end, BD, FIRST_GROUPS, GROUP_SPLITS)
        acc, denominator, largest = add_groups(acc, 0.0, -float("inf"), sums, total, group_largest)
        if num_groups > FIRST_GROUPS:
            loaded = load_splits(
                part_sum, part_largest, part_total, partial, step, FIRST_GROUPS, last_partial, dim,
                HD, NEXT_GROUPS, GROUP_SPLITS,
            )  # fmt: skip
            for start in range(FIRST_GROUPS, num_groups, NEXT_GROUPS):
                # Load one step ahead: even a long context waits for memory only once.
                later = load_splits(
                    part_sum, part_largest, part_total, partial, step, start + NEXT_GROUPS, last_partial, dim,
                    HD, NEXT_GROUPS, GROUP_SPLITS,
                )  # fmt: skip
                next_sums, next_total, next_largest = fold_splits(
                    loaded, start, begin, end, BD, NEXT_GROUPS, GROUP_SPLITS
                )
                acc, denominator, largest = add_groups(
                    acc, denominator, largest, next_sums, next_total, next_largest
                )
                loaded = later
    value = acc / tl.where(denominator == 0.0, 1.0, denominator)
    value = value * (1.0 / (1.0 + tl.exp(-g)))
    tl.store(out + item * HD + dim, value.to(out.dtype.element_ty))
