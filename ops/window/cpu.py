"""`read_window` and `accept_window` on a CPU: a few integers per request, in plain Python."""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_mtp.ops.features import ALL_MASKED, BAD_WORDS, DRAWN, PENALTIES, RECENT_IDS
from compiled_mtp.ops.window.reference import (
    Accepted,
    Cursors,
    History,
    Window,
    committed_ids,
    position_hash,
)

Places = tuple[list[int], list[int]]


def _place(start: int, count: int, end: int, table: Tensor, block_size: int) -> Places:
    """Do what `place_rows` does for one request, whose row of the block table is `table` [blocks]."""
    positions = [min(start + row, end - 1) for row in range(count)]
    first = min(start, end - 1) // block_size
    blocks = table[first : positions[-1] // block_size + 1].tolist() if positions else []
    slots = []
    for row, position in enumerate(positions):
        block = blocks[position // block_size - first]
        is_written = block > 0 and start + row < end
        slots.append(block * block_size + position % block_size if is_written else -1)
    return positions, slots


def read_window(
    state_index: Tensor,
    cursors: Cursors,
    drafts: Tensor,
    block_table: Tensor,
    mtp_step: int,
    block_size: int,
    end: int,
) -> Window:
    index, table = state_index.tolist(), block_table[state_index.long()]
    base, pos, last_token = (cursor.tolist() for cursor in cursors)
    starts = [pos[slot] for slot in index]
    tokens: list[int] = []
    places: Places = ([], [])
    for slot, start, own_table in zip(index, starts, table, strict=True):
        tokens += [last_token[slot], *drafts[slot, :mtp_step].tolist()]
        for column, found in zip(
            places, _place(start, mtp_step + 1, end, own_table, block_size), strict=True
        ):
            column += found
    sampled = [start + 1 + row for start in starts for row in range(mtp_step + 1)]
    made = ([base[slot] for slot in index], starts, tokens, *places, sampled)
    columns = [torch.tensor(column, dtype=torch.int64) for column in made]
    return Window(columns[0], columns[1], columns[2], columns[3], columns[4], columns[5], table)


def accept_window(
    tokens: Tensor,
    sampled: Tensor,
    outcome: Tensor,
    state_index: Tensor,
    start: Tensor,
    table: Tensor,
    cursors: Cursors,
    history: History,
    mtp_step: int,
    block_size: int,
    end: int,
    hash_limit: Tensor | None = None,
    forced_ids: Tensor | None = None,
    token_ids: Tensor | None = None,
    matched: Tensor | None = None,
    max_unfolded: int = 0,
) -> Accepted:
    query_len, index, starts = mtp_step + 1, state_index.tolist(), start.tolist()
    if forced_ids is not None:
        after = start[:, None] + torch.arange(1, query_len + 1)
        by_request = sampled.view(len(index), query_len)
        sampled = committed_ids(by_request, after, state_index.long(), forced_ids).flatten()
    drawn, outcomes = sampled.tolist(), outcome.tolist()
    agrees = _agrees(tokens.tolist(), drawn, state_index, start, query_len, hash_limit, matched)
    features = history.features.tolist()
    packed: list[list[int]] = []
    rows: list[int] = []
    bonuses: list[int] = []
    ends: list[int] = []
    places: Places = ([], [])
    padded = len(index) + len(index) % 2
    chain_positions = torch.zeros((mtp_step, padded), dtype=torch.int64)
    chain_slots = torch.full_like(chain_positions, -1)
    for request, (slot, first) in enumerate(zip(index, starts, strict=True)):
        own = slice(request * query_len, (request + 1) * query_len)
        new, is_drawn = drawn[own], [one == DRAWN for one in outcomes[own]]
        accepted = _leading(agrees[own][:mtp_step])
        num_new = accepted + 1 if slot > 0 else 0
        finite = _leading(is_drawn)
        is_masked = finite < num_new and outcomes[own][finite] == ALL_MASKED
        packed.append([num_new, -1 - finite if is_masked else min(finite, num_new), *new])
        rows.append(request * query_len + accepted)
        bonuses.append(new[accepted] if slot > 0 else 0)
        ends.append(first + num_new)
        if features[slot] & (PENALTIES | BAD_WORDS):
            _remember(history, slot, first, sampled[own][:num_new])
        if token_ids is not None:
            count = max(min(num_new, end - 1 - first), 0)
            token_ids[slot, first + 1 : first + 1 + count] = sampled[own][:count]
        for column, found in zip(
            places, _place(first + 1, query_len, end, table[request], block_size), strict=True
        ):
            column += found
        made = _place(first + num_new + 1, mtp_step, end, table[request], block_size)
        for chain, found in zip((chain_positions, chain_slots), made, strict=True):
            chain[:, request] = torch.tensor(found, dtype=torch.int64)
    bonus, slots = torch.tensor(bonuses), state_index.long()
    base = cursors.base[slots]
    cursors.base[slots] = torch.where(start - base + query_len <= max_unfolded, base, start)
    cursors.pos[slots] = torch.tensor(ends)
    cursors.last_token[slots] = bonus
    positions, kv_slots = (torch.tensor(column) for column in places)
    return Accepted(
        torch.tensor(packed), torch.tensor(rows), bonus, positions, kv_slots, chain_positions, chain_slots
    )


def _agrees(
    tokens: list[int],
    drawn: list[int],
    state_index: Tensor,
    start: Tensor,
    query_len: int,
    hash_limit: Tensor | None,
    matched: Tensor | None,
) -> list[bool]:
    """Return for each row whether the draft after it is right; ignore the value of a request's last row."""
    limit = -1 if hash_limit is None else int(hash_limit)
    compared = [token == one for token, one in zip([*tokens[1:], -1], drawn, strict=True)]
    if limit < 0:
        return compared
    places = start[:, None] + torch.arange(1, query_len + 1)
    hashed: list[bool] = (position_hash(places, state_index.long()[:, None]) < limit).flatten().tolist()
    if matched is None:
        return hashed
    is_looked_up = (matched[state_index.long()] > 0).repeat_interleave(query_len).tolist()
    return [compared[row] if found else hashed[row] for row, found in enumerate(is_looked_up)]


def _leading(flags: list[bool]) -> int:
    """Return the number of true flags before the first false one."""
    return next((place for place, flag in enumerate(flags) if not flag), len(flags))


def _remember(history: History, slot: int, start: int, new: Tensor) -> None:
    """Add a slot's new tokens [n], which follow position `start`, to its history."""
    places = (start + 1 + torch.arange(len(new))) % RECENT_IDS
    history.output_counts[slot].index_add_(0, new, torch.ones_like(new, dtype=torch.int32))
    history.recent_ids[slot, places] = new
