"""The verify route: keys cut into splits at absolute positions, attended to apart and then combined."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_mtp.ops.paged_attention.attend_kernel import attend_range

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
# (first key beyond, keys a split): short splits first, since a short context has few programs at work and
# waits for its longest; long ones later, since every split costs a write and a read of its partial sums.
SPLIT_SIZES = ((1024, 64), (4096, 128), (32768, 256), (1 << 31, 1024))
# Splits of which combine loads the parts before it knows how many there are, and then at a time.
FIRST_SPLITS = 16
NEXT_SPLITS = 32


@triton.jit
def split_of(key):
    """The split that holds a key."""
    split = tl.where(key < 4096, 16 + (key - 1024) // 128, 40 + (key - 4096) // 256)
    split = tl.where(key < 32768, split, 152 + (key - 32768) // 1024)
    return tl.where(key < 1024, key // 64, split)


@triton.jit
def split_begin(split):
    """The first key of a split."""
    key = tl.where(split < 40, 1024 + (split - 16) * 128, 4096 + (split - 40) * 256)
    key = tl.where(split < 152, key, 32768 + (split - 152) * 1024)
    return tl.where(split < 16, split * 64, key)


def count_splits(num_keys: int) -> int:
    """Splits that `num_keys` keys from position 0 reach into."""
    count, begin = 0, 0
    for end, size in SPLIT_SIZES:
        count += max(0, -(-(min(num_keys, end) - begin) // size))
        begin = end
    return count


@triton.jit
def find_item(turn, ends, counts, requests, row_tiles, first_split, HKV: tl.constexpr):
    """Request, split, kv head and row tile of this program's item of a turn."""
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    # Late splits are the long ones: hand them out first, and turn the order round every time.
    item = turn * num_programs + tl.where(turn % 2 == 0, program, num_programs - 1 - program)
    unit = tl.max(ends, 0) - 1 - item // (row_tiles * HKV)
    request = tl.sum((ends <= unit).to(tl.int32), 0)
    split = unit - tl.sum(tl.where(requests < request, counts, 0), 0) + first_split
    return request, split, item // row_tiles % HKV, item % row_tiles


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
    BLOCK_SIZE: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    TAIL_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Items (request, split, kv head, BM rows), as many as the positions give, shared out by turns."""
    # Who attends to what is known before the queries are.
    if PDL:
        gdc_launch_dependents()
    requests = tl.arange(0, MAX_REQUESTS)
    is_request = requests < num_requests
    # One vector a step, not one tile: its lanes lie in one warp, and no sum over it leaves the warp.
    last = tl.full((MAX_REQUESTS,), -1, tl.int32)
    lowest = tl.full((MAX_REQUESTS,), 2147483646, tl.int32)
    for step in tl.static_range(MAX_WINDOW):
        is_step = is_request & (tl.zeros_like(requests) + step < query_len)
        position = tl.load(positions + requests * query_len + step, mask=is_step, other=-1).to(tl.int32)
        last = tl.maximum(last, position)
        lowest = tl.minimum(lowest, tl.where(is_step, position, 2147483646))
    last = tl.minimum(last, max_blocks * BLOCK_SIZE - 1)
    first_split = split_of(first_key)
    counts = tl.where(last >= first_key, split_of(last) + 1 - first_split, 0)
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
    for turn in tl.range(0, turns, num_stages=1, disable_licm=True):
        request, split, kv_head, row_tile = find_item(
            turn, ends, counts, requests, row_tiles, first_split, HKV
        )
        is_request = requests == request
        end = tl.sum(tl.where(is_request, last, 0), 0) + 1
        seen_by_all = tl.sum(tl.where(is_request, lowest, 0), 0) + 1
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
        acc, largest, total = attend_range(
            queries,
            kv + kv_head.to(tl.int64) * head_stride,
            kv_scale + kv_head.to(tl.int64) * scale_head_stride,
            table,
            begin,
            tl.minimum(end, split_begin(split + 1)),
            seen_by_all,
            row_position,
            first_key,
            max_blocks,
            BLOCK_SIZE,
            block_stride,
            half_stride,
            token_stride,
            scale_block_stride,
            scale_half_stride,
            scale_log2,
            BM,
            HD,
            BN,
            BLOCK_SIZE % BN == 0,
            HAS_SCALE,
            TAIL_STAGES,
            TAIL_STAGES == 1,
        )
        # Rows of an item lie one after another: one address and constant offsets.
        part = (
            ((request.to(tl.int64) * num_splits + split) * HKV + kv_head) * query_len * GROUP
        ) + row_tile * BM
        row = tl.arange(0, BM)
        is_row = row < query_len * GROUP - row_tile * BM
        tl.store(part_sum + part * HD + row[:, None] * HD + dim[None, :], acc, mask=is_row[:, None])
        tl.store(part_largest + part + row, largest, mask=is_row)
        tl.store(part_total + part + row, total, mask=is_row)


@triton.jit
def load_parts(
    part_sum,
    part_largest,
    part_total,
    part,
    step,
    start,
    end,
    dim,
    HD: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """The parts of splits start .. start + SPLITS - 1 of a row, those from `end` on the last one's.

    Without masks, which would make the compiler wait for each load before it issues the next.
    """
    at = part + tl.minimum(start + tl.arange(0, SPLITS), end - 1) * step
    sums = tl.load(part_sum + at[:, None] * HD + dim[None, :])
    return sums, tl.load(part_largest + at), tl.load(part_total + at)


@triton.jit
def add_parts(acc, denominator, largest, is_split, sums, split_largest, split_total):
    """Adds the parts [SPLITS, BD] of some splits of a row to the parts before them."""
    split_largest = tl.where(is_split, split_largest, -float("inf"))
    split_total = tl.where(is_split, split_total, 0.0)
    sums = tl.where(is_split[:, None], sums, 0.0)
    new_largest = tl.maximum(largest, tl.max(split_largest, 0))
    base = tl.where(new_largest == -float("inf"), 0.0, new_largest)
    weight = tl.exp2(split_largest - base)
    factor = tl.exp2(largest - base)
    acc = acc * factor + tl.sum(sums * weight[:, None], 0)
    denominator = denominator * factor + tl.sum(split_total * weight, 0)
    return acc, denominator, new_largest


@triton.jit(do_not_specialize=UNSPECIALIZED)
def combine_kernel(
    part_sum,
    part_largest,
    part_total,
    gate,
    positions,
    out,
    gate_row_stride,
    gate_head_stride,
    query_len,
    num_splits,
    num_keys,
    first_key,
    HKV: tl.constexpr,
    GROUP: tl.constexpr,
    HD: tl.constexpr,
    BD: tl.constexpr,
    FIRST_SPLITS: tl.constexpr,
    NEXT_SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One head of one row: BD of its dims, summed over its splits in order, times the gate."""
    if PDL:
        gdc_launch_dependents()
    item = tl.program_id(0).to(tl.int64)
    row = item // (HKV * GROUP)
    head = item % (HKV * GROUP)
    dim = tl.program_id(1) * BD + tl.arange(0, BD)
    # The part of split 0; the next one lies `step` further.
    step = HKV * query_len * GROUP
    part = row // query_len * num_splits * step
    part += head // GROUP * query_len * GROUP + row % query_len * GROUP + head % GROUP
    # The position is older than this call's keys.
    last = tl.minimum(tl.load(positions + row), num_keys - 1).to(tl.int32)
    begin = split_of(first_key)
    end = tl.where(last >= first_key, split_of(last) + 1, 0)
    if PDL:
        gdc_wait()
    sums, split_largest, split_total = load_parts(
        part_sum, part_largest, part_total, part, step, 0, num_splits, dim, HD, FIRST_SPLITS
    )
    g = tl.load(gate + row * gate_row_stride + head * gate_head_stride + dim).to(tl.float32)
    acc = tl.zeros((BD,), tl.float32)
    split = tl.arange(0, FIRST_SPLITS)
    acc, denominator, largest = add_parts(
        acc, 0.0, -float("inf"), (split >= begin) & (split < end), sums, split_largest, split_total
    )
    if end > FIRST_SPLITS:
        next_sums, next_largest, next_total = load_parts(
            part_sum, part_largest, part_total, part, step, FIRST_SPLITS, end, dim, HD, NEXT_SPLITS
        )
        for start in range(FIRST_SPLITS, end, NEXT_SPLITS):
            # One step ahead: a long context waits for memory once, too.
            later_sums, later_largest, later_total = load_parts(
                part_sum, part_largest, part_total, part, step, start + NEXT_SPLITS, end, dim, HD, NEXT_SPLITS
            )
            next_split = start + tl.arange(0, NEXT_SPLITS)
            is_next = (next_split >= begin) & (next_split < end)
            acc, denominator, largest = add_parts(
                acc, denominator, largest, is_next, next_sums, next_largest, next_total
            )
            next_sums, next_largest, next_total = later_sums, later_largest, later_total
    value = acc / tl.where(denominator == 0.0, 1.0, denominator)
    value = value * (1.0 / (1.0 + tl.exp(-g)))
    tl.store(out + item * HD + dim, value.to(out.dtype.element_ty))
