"""A decode round's bookkeeping in two launches, in place of some fifteen small ones around its products."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_mtp.ops.device import device_of
from compiled_mtp.ops.window.reference import HASH_FACTOR, MAX_MTP_STEP

TABLE_BLOCK = 1024
# Of the longest window and what its chain adds: one binary for every mtp_step.
LANES = 2 * (MAX_MTP_STEP + 1)
UNSPECIALIZED = ("window", "max_blocks", "end", "table_stride", "drafts_stride", "chain_stride", "hash_limit")


@triton.jit
def place(wanted, end, table, block_size):
    """Clamped position and KV slot, -1 where nothing is to be written; every lane reads inside its table."""
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
    slots,
    sampled_positions,
    table,
    drafts_stride,
    table_stride,
    window,
    max_blocks,
    block_size,
    end,
    LANES: tl.constexpr,
    TABLE_BLOCK: tl.constexpr,
):
    """Program (b, 0) writes the rows of request b; all of them copy a part of its block table."""
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
        is_row = lane < window
        is_draft = is_row & (lane > 0)
        token = tl.load(drafts + slot * drafts_stride + lane - 1, mask=is_draft, other=0)
        token = tl.where(is_draft, token, tl.load(last_token + slot))
        wanted = first + lane
        position, kv_slot = place(wanted, end, own_table, block_size)
        row = request * window + lane
        tl.store(tokens + row, token, mask=is_row)
        tl.store(positions + row, position, mask=is_row)
        tl.store(slots + row, kv_slot, mask=is_row)
        tl.store(sampled_positions + row, wanted + 1, mask=is_row)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def accept_window_kernel(
    tokens,
    sampled,
    state_index,
    start,
    table,
    base,
    pos,
    last_token,
    result,
    accepted_row,
    bonus,
    positions,
    slots,
    chain_positions,
    chain_slots,
    window,
    max_blocks,
    block_size,
    end,
    chain_stride,
    hash_limit,
    LANES: tl.constexpr,
    HASH_FACTOR: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a request. Rows of extend and chain lie within one run of positions from `start` on."""
    if PDL:
        gdc_launch_dependents()
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(state_index + request).to(tl.int64)
    first = tl.load(start + request)
    lane = tl.arange(0, LANES)
    is_row = lane < window
    is_draft = lane < window - 1
    row = request * window + lane
    drafted = tl.load(tokens + row + 1, mask=is_draft, other=0)
    wanted = first + lane
    position, kv_slot = place(wanted, end, table + request * max_blocks, block_size)
    # All of this is older than the samples (ops.device).
    if PDL:
        gdc_wait()
    drawn = tl.load(sampled + row, mask=is_row, other=0)
    is_wrong = is_draft & (drafted != drawn)
    if hash_limit >= 0:
        is_wrong = is_draft & ((wanted + 1) * HASH_FACTOR % 4294967296 // 65536 >= hash_limit)
    num_accepted = tl.min(tl.where(is_wrong, lane, window - 1), 0)
    is_live = slot > 0
    num_new = tl.where(is_live, num_accepted + 1, 0)
    last = tl.where(is_live, tl.sum(tl.where(lane == num_accepted, drawn, 0), 0), 0)
    tl.store(base + slot, first)
    tl.store(pos + slot, first + num_new)
    tl.store(last_token + slot, last)
    tl.store(result + request * (window + 1), num_new.to(tl.int64))
    tl.store(result + request * (window + 1) + 1 + lane, drawn, mask=is_row)
    tl.store(accepted_row + request, request * window + num_accepted)
    tl.store(bonus + request, last)
    is_extended = (lane > 0) & (lane <= window)
    tl.store(positions + row - 1, position, mask=is_extended)
    tl.store(slots + row - 1, kv_slot, mask=is_extended)
    link = lane - num_new - 1
    is_link = (link >= 0) & (link < window - 1)
    at = link * chain_stride + request
    tl.store(chain_positions + at, position, mask=is_link)
    tl.store(chain_slots + at, kv_slot, mask=is_link)
    # The column that pads an odd batch.
    if (request == tl.num_programs(0) - 1) & (chain_stride > request + 1):
        at = lane * chain_stride + request + 1
        tl.store(chain_positions + at, tl.zeros((LANES,), tl.int64), mask=is_draft)
        tl.store(chain_slots + at, tl.full((LANES,), -1, tl.int64), mask=is_draft)


def launch_read_window(
    state_index: torch.Tensor,
    base: torch.Tensor,
    pos: torch.Tensor,
    last_token: torch.Tensor,
    drafts: torch.Tensor,
    block_table: torch.Tensor,
    mtp_step: int,
    block_size: int,
    end: int,
) -> tuple[torch.Tensor, ...]:
    batch, max_blocks = state_index.shape[0], block_table.shape[1]
    folded = pos.new_empty((batch,))
    start = pos.new_empty((batch,))
    tokens, positions, slots, sampled_positions = (pos.new_empty((batch * (mtp_step + 1),)) for _ in range(4))
    table = block_table.new_empty((batch, max_blocks))
    read_window_kernel[(batch, triton.cdiv(max_blocks, TABLE_BLOCK))](
        state_index, base, pos, last_token, drafts, block_table,
        folded, start, tokens, positions, slots, sampled_positions, table,
        drafts.stride(0), block_table.stride(0), mtp_step + 1, max_blocks, block_size, end,
        LANES=LANES, TABLE_BLOCK=TABLE_BLOCK, num_warps=4,
    )  # fmt: skip
    return folded, start, tokens, positions, slots, sampled_positions, table


def launch_accept_window(
    tokens: torch.Tensor,
    sampled: torch.Tensor,
    state_index: torch.Tensor,
    start: torch.Tensor,
    table: torch.Tensor,
    base: torch.Tensor,
    pos: torch.Tensor,
    last_token: torch.Tensor,
    mtp_step: int,
    block_size: int,
    end: int,
    hash_limit: int,
) -> tuple[torch.Tensor, ...]:
    batch, window = start.shape[0], mtp_step + 1
    result = start.new_empty((batch, 1 + window))
    accepted_row, bonus = start.new_empty((batch,)), start.new_empty((batch,))
    positions, slots = start.new_empty((batch * window,)), start.new_empty((batch * window,))
    chain_positions = start.new_empty((mtp_step, batch + batch % 2))
    chain_slots = torch.empty_like(chain_positions)
    has_pdl = device_of(start.device.index).has_dependent_launch
    accept_window_kernel[(batch,)](
        tokens, sampled, state_index, start, table, base, pos, last_token,
        result, accepted_row, bonus, positions, slots, chain_positions, chain_slots,
        window, table.shape[1], block_size, end, chain_positions.shape[1], hash_limit,
        LANES=LANES, HASH_FACTOR=HASH_FACTOR, PDL=has_pdl, num_warps=1, launch_pdl=has_pdl,
    )  # fmt: skip
    return result, accepted_row, bonus, positions, slots, chain_positions, chain_slots
