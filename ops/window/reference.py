"""What read_window and accept_window compute, and where rows lie: plain integer arithmetic."""

from __future__ import annotations

import torch

MAX_MTP_STEP = 7
# Knuth's multiplicative hash, of a draft's position.
HASH_FACTOR = 2654435761


def place_rows(
    start: torch.Tensor, count: int, end: int | torch.Tensor, block_table: torch.Tensor, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions and KV slots [B, count] int64 of rows start [B], start + 1, ... of each request.

    From `end` on (an int, or [B, 1]) positions are clamped and nothing is to be written: slot -1, as for a
    block that is not reserved (-1) or the padding's (0) in block_table [B, blocks] int32.
    """
    wanted = start[:, None] + torch.arange(count, device=start.device)
    positions = wanted.clamp(max=end - 1)
    block = block_table.gather(1, positions // block_size).to(torch.int64)
    is_written = (block > 0) & (wanted < end)
    return positions, torch.where(is_written, block * block_size + positions % block_size, -1)


def place_chain(
    start: torch.Tensor, mtp_step: int, end: int, block_table: torch.Tensor, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`place_rows` of the drafts at start + 1 .. start + mtp_step, transposed: [mtp_step, P] int64.

    P is B rounded up to an even number, so that every draft's rows lie at a multiple of 16 bytes; what it
    adds is 0, and -1 among the slots.
    """
    batch = start.shape[0]
    positions, slots = place_rows(start + 1, mtp_step, end, block_table, block_size)
    padded_positions = positions.new_zeros((mtp_step, batch + batch % 2))
    padded_slots = torch.full_like(padded_positions, -1)
    padded_positions[:, :batch] = positions.t()
    padded_slots[:, :batch] = slots.t()
    return padded_positions, padded_slots


def read_window(
    state_index: torch.Tensor,
    base: torch.Tensor,
    pos: torch.Tensor,
    last_token: torch.Tensor,
    drafts: torch.Tensor,
    block_table: torch.Tensor,
    mtp_step: int,
    block_size: int,
    end: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    index, window = state_index.to(torch.int64), mtp_step + 1
    start, table = pos[index], block_table[index]
    tokens = torch.cat((last_token[index][:, None], drafts[index][:, :mtp_step]), dim=1)
    positions, slots = place_rows(start, window, end, table, block_size)
    sampled_positions = start[:, None] + 1 + torch.arange(window, device=start.device)
    return (
        base[index],
        start,
        tokens.flatten(),
        positions.flatten(),
        slots.flatten(),
        sampled_positions.flatten(),
        table,
    )


def accept_window(
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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    index, is_live, window = state_index.to(torch.int64), state_index > 0, mtp_step + 1
    batch = start.shape[0]
    drawn = sampled.view(batch, window)
    if hash_limit >= 0:
        places = start[:, None] + torch.arange(1, window, device=start.device)
        agrees = places * HASH_FACTOR % 2**32 // 2**16 < hash_limit
    else:
        agrees = tokens.view(batch, window)[:, 1:] == drawn[:, :-1]
    num_accepted = agrees.to(torch.int64).cumprod(dim=1).sum(dim=1)
    num_new = torch.where(is_live, num_accepted + 1, 0)
    bonus = torch.where(is_live, drawn.gather(1, num_accepted[:, None])[:, 0], 0)
    base[index] = start
    pos[index] = start + num_new
    last_token[index] = bonus
    positions, slots = place_rows(start + 1, window, end, table, block_size)
    chain_positions, chain_slots = place_chain(start + num_new, mtp_step, end, table, block_size)
    return (
        torch.cat((num_new[:, None], drawn), dim=1),
        torch.arange(batch, device=start.device) * window + num_accepted,
        bonus,
        positions.flatten(),
        slots.flatten(),
        chain_positions,
        chain_slots,
    )
