"""A decode round's bookkeeping in two launches instead of some fifteen small ones."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_mtp.ops.device import device_of
from compiled_mtp.ops.features import ALL_MASKED, BAD_WORDS, DRAWN, PENALTIES, RECENT_IDS
from compiled_mtp.ops.window.reference import HASH_FACTOR, MAX_DRAFTS, MIX_FACTOR

TABLE_BLOCK = 1024
# Lanes for the longest window and the rows that its chain adds: one binary for every number of drafts.
LANES = 2 * (MAX_DRAFTS + 1)
UNSPECIALIZED = (
    "query_len",
    "max_blocks",
    "end",
    "table_stride",
    "drafts_stride",
    "chain_stride",
    "hash_limit",
    "forced_ids",
    "forced_stride",
    "token_ids",
    "token_stride",
    "matched",
    "max_unfolded",
)


@triton.jit
def place(wanted, end, table, block_size):
    """Return clamped position and kv_index, -1 for no write; every lane reads inside its block table."""
    position = tl.minimum(wanted, end - 1)
    block = tl.load(table + position // block_size).to(tl.int64)
    is_written = (block > 0) & (wanted < end)
    return position, tl.where(is_written, block * block_size + position % block_size, -1)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def read_window_kernel(
    state_index,
    base,
    pos,
    last_token,
    drafts,
    block_table,
    folded,
    start,
    tokens,
    positions,
    kv_slots,
    sampled_positions,
    table,
    drafts_stride,
    table_stride,
    query_len,
    max_blocks,
    block_size,
    end,
    LANES: tl.constexpr,
    TABLE_BLOCK: tl.constexpr,
):
    """Program (b, 0) writes the rows of request b; program (b, i) copies part i of its block table."""
    request = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    slot = tl.load(state_index + request).to(tl.int64)
    own_table = block_table + slot * table_stride
    column = part * TABLE_BLOCK + tl.arange(0, TABLE_BLOCK)
    blocks = tl.load(own_table + column, mask=column < max_blocks, other=0)
    tl.store(table + request * max_blocks + column, blocks, mask=column < max_blocks)
    if part == 0:
        first = tl.load(pos + slot)
        tl.store(start + request, first)
        tl.store(folded + request, tl.load(base + slot))
        lane = tl.arange(0, LANES)
        is_row = lane < query_len
        is_draft = is_row & (lane > 0)
        token = tl.load(drafts + slot * drafts_stride + lane - 1, mask=is_draft, other=0)
        token = tl.where(is_draft, token, tl.load(last_token + slot))
        wanted = first + lane
        position, kv_slot = place(wanted, end, own_table, block_size)
        row = request * query_len + lane
        tl.store(tokens + row, token, mask=is_row)
        tl.store(positions + row, position, mask=is_row)
        tl.store(kv_slots + row, kv_slot, mask=is_row)
        tl.store(sampled_positions + row, wanted + 1, mask=is_row)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def accept_window_kernel(
    tokens,
    sampled,
    outcome,
    state_index,
    start,
    table,
    base,
    pos,
    last_token,
    features,
    counts,
    counts_stride,
    recent_ids,
    token_ids,
    packed,
    accepted_row,
    bonus,
    positions,
    kv_slots,
    chain_positions,
    chain_slots,
    query_len,
    max_blocks,
    block_size,
    end,
    chain_stride,
    hash_limit,
    forced_ids,
    forced_stride,
    token_stride,
    matched,
    max_unfolded,
    LANES: tl.constexpr,
    HASH_FACTOR: tl.constexpr,
    MIX_FACTOR: tl.constexpr,
    RECENT_IDS: tl.constexpr,
    REMEMBERED: tl.constexpr,
    DRAWN: tl.constexpr,
    ALL_MASKED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per request: all rows of extend and chain lie in one run of positions from `start` on."""
    if PDL:
        gdc_launch_dependents()
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(state_index + request).to(tl.int64)
    first = tl.load(start + request)
    own_features = tl.load(features + slot)
    lane = tl.arange(0, LANES)
    is_row = lane < query_len
    is_draft = lane < query_len - 1
    row = request * query_len + lane
    drafted = tl.load(tokens + row + 1, mask=is_draft, other=0)
    wanted = first + lane
    position, kv_slot = place(wanted, end, table + request * max_blocks, block_size)
    if PDL:
        gdc_wait()
    drawn = tl.load(sampled + row, mask=is_row, other=0)
    state = tl.load(outcome + row, mask=is_row, other=DRAWN).to(tl.int32)
    if forced_ids is not None:
        is_inside = is_row & (wanted + 1 < forced_stride)
        forced = tl.load(forced_ids + slot * forced_stride + wanted + 1, mask=is_inside, other=-1)
        drawn = tl.where(forced >= 0, forced.to(tl.int64), drawn)
    is_wrong = is_draft & (drafted != drawn)
    if hash_limit is not None:
        limit = tl.load(hash_limit)
        word = (wanted + 1 + slot * MIX_FACTOR) * HASH_FACTOR & 0xFFFFFFFF
        word = (word ^ (word >> 16)) * MIX_FACTOR & 0xFFFFFFFF
        is_compared = limit < 0
        if matched is not None:
            is_compared = is_compared | (tl.load(matched + slot) > 0)
        is_wrong = tl.where(is_compared, is_wrong, is_draft & ((word >> 16) >= limit))
    num_accepted = tl.min(tl.where(is_wrong, lane, query_len - 1), 0)
    is_live = slot > 0
    num_new = tl.where(is_live, num_accepted + 1, 0)
    num_finite = tl.min(tl.where(state != DRAWN, lane, query_len), 0)
    is_masked = (num_finite < num_new) & (tl.sum(tl.where(lane == num_finite, state, 0), 0) == ALL_MASKED)
    num_finite = tl.where(is_masked, -1 - num_finite, tl.minimum(num_finite, num_new))
    last = tl.where(is_live, tl.sum(tl.where(lane == num_accepted, drawn, 0), 0), 0)
    folded = tl.load(base + slot)
    tl.store(base + slot, tl.where(first - folded + query_len <= max_unfolded, folded, first))
    tl.store(pos + slot, first + num_new)
    tl.store(last_token + slot, last)
    packed += request * (query_len + 2)
    tl.store(packed, num_new.to(tl.int64))
    tl.store(packed + 1, num_finite.to(tl.int64))
    tl.store(packed + 2 + lane, drawn, mask=is_row)
    if own_features & REMEMBERED:
        is_new = lane < num_new
        # Integer sums do not depend on their order.
        tl.atomic_add(counts + slot * counts_stride + drawn, 1, mask=is_new)
        tl.store(recent_ids + slot * RECENT_IDS + (wanted + 1) % RECENT_IDS, drawn, mask=is_new)
    if token_ids is not None:
        is_placed = (lane < num_new) & (wanted + 1 < end)
        tl.store(token_ids + slot * token_stride + wanted + 1, drawn.to(tl.int32), mask=is_placed)
    tl.store(accepted_row + request, request * query_len + num_accepted)
    tl.store(bonus + request, last)
    is_extended = (lane > 0) & (lane <= query_len)
    tl.store(positions + row - 1, position, mask=is_extended)
    tl.store(kv_slots + row - 1, kv_slot, mask=is_extended)
    link = lane - num_new - 1
    is_link = (link >= 0) & (link < query_len - 1)
    at = link * chain_stride + request
    tl.store(chain_positions + at, position, mask=is_link)
    tl.store(chain_slots + at, kv_slot, mask=is_link)
    # Fill the column that pads an odd batch.
    if (request == tl.num_programs(0) - 1) & (chain_stride > request + 1):
        at = lane * chain_stride + request + 1
        tl.store(chain_positions + at, tl.zeros((LANES,), tl.int64), mask=is_draft)
        tl.store(chain_slots + at, tl.full((LANES,), -1, tl.int64), mask=is_draft)


def launch_read_window(args: Any) -> tuple[torch.Tensor, ...]:
    cursors, block_table, query_len = args.cursors, args.block_table, args.mtp_step + 1
    batch, max_blocks = args.state_index.shape[0], block_table.shape[1]
    base, pos = (cursors.pos.new_empty((batch,)) for _ in range(2))
    tokens, positions, kv_slots, sampled = (cursors.pos.new_empty((batch * query_len,)) for _ in range(4))
    table = block_table.new_empty((batch, max_blocks))
    read_window_kernel[(batch, triton.cdiv(max_blocks, TABLE_BLOCK))](
        args.state_index, *cursors, args.drafts, block_table,
        base, pos, tokens, positions, kv_slots, sampled, table,
        args.drafts.stride(0), block_table.stride(0), query_len, max_blocks, args.block_size, args.end,
        LANES=LANES, TABLE_BLOCK=TABLE_BLOCK, num_warps=4,
    )  # fmt: skip
    return base, pos, tokens, positions, kv_slots, sampled, table


def launch_accept_window(args: Any) -> tuple[torch.Tensor, ...]:
    start, mtp_step, query_len = args.start, args.mtp_step, args.mtp_step + 1
    batch = start.shape[0]
    packed = start.new_empty((batch, 2 + query_len))
    accepted_row, bonus = start.new_empty((batch,)), start.new_empty((batch,))
    positions, kv_slots = start.new_empty((batch * query_len,)), start.new_empty((batch * query_len,))
    chain_positions = start.new_empty((mtp_step, batch + batch % 2))
    chain_slots = torch.empty_like(chain_positions)
    has_pdl = device_of(start.device.index).has_dependent_launch
    forced_stride = 0 if args.forced_ids is None else args.forced_ids.stride(0)
    token_stride = 0 if args.token_ids is None else args.token_ids.stride(0)
    counts, token_ids = args.history.output_counts, args.token_ids
    accept_window_kernel[(batch,)](
        args.tokens, args.sampled, args.outcome, args.state_index, start, args.table, *args.cursors,
        args.history.features, counts, counts.stride(0), args.history.recent_ids, token_ids,
        packed, accepted_row, bonus, positions, kv_slots, chain_positions, chain_slots,
        query_len, args.table.shape[1], args.block_size, args.end, chain_positions.shape[1], args.hash_limit,
        args.forced_ids, forced_stride, token_stride, args.matched, args.max_unfolded,
        LANES=LANES, HASH_FACTOR=HASH_FACTOR, MIX_FACTOR=MIX_FACTOR, RECENT_IDS=RECENT_IDS,
        REMEMBERED=PENALTIES | BAD_WORDS, DRAWN=DRAWN, ALL_MASKED=ALL_MASKED, PDL=has_pdl,
        num_warps=1, launch_pdl=has_pdl,
    )  # fmt: skip
    return packed, accepted_row, bonus, positions, kv_slots, chain_positions, chain_slots
