"""Slots at every stage of a request, and the arguments that read_window and accept_window get for them."""

from __future__ import annotations

from typing import Any

import torch

from compiled_mtp.ops.features import ALL_MASKED, BAD_WORDS, DRAWN, NOT_FINITE, PENALTIES, RECENT_IDS
from compiled_mtp.ops.window import Cursors, History, Window

BLOCK_SIZE, BLOCKS, END = 16, 5, 75
SLOTS = 9
HASH_LIMIT = 40000


def make_slots(mtp_step: int, device: str) -> dict[str, torch.Tensor]:
    """Return slots by name: row 0 is padding.

    The others are at the beginning, in mid-text, at a block's edge, near `END`, and before a block that is
    not reserved.
    """
    generator = torch.Generator().manual_seed(mtp_step)
    pos = torch.tensor([0, 0, 3, 15, 16, 62, END - 1, END - 2, 30])
    ids = torch.randint(1, 50, (SLOTS, max(mtp_step, 1) + 1), generator=generator)
    table = torch.arange(1, SLOTS * BLOCKS + 1).view(SLOTS, BLOCKS)
    table[0] = -1
    table[8, 2:] = -1
    made = {
        "base": (pos - 2).clamp(min=0),
        "pos": pos,
        "last_token": ids[:, 0].clone(),
        "drafts": ids[:, 1:].clone(),
        "block_table": table.to(torch.int32),
        # Slots without a history, and slots that need one for penalties or bad words.
        "features": torch.tensor([0, 0, PENALTIES, BAD_WORDS, 0, 9, PENALTIES, 6, BAD_WORDS]).to(torch.int32),
        "output_counts": torch.randint(0, 4, (SLOTS, 80), generator=generator, dtype=torch.int32),
        "recent_ids": torch.full((SLOTS, RECENT_IDS), -1),
    }
    made["last_token"][0] = made["drafts"][0] = 0
    return {name: tensor.to(device) for name, tensor in made.items()}


def read_arguments(slots: dict[str, torch.Tensor], order: list[int], mtp_step: int) -> tuple[Any, ...]:
    index = torch.tensor(order, dtype=torch.int32, device=slots["pos"].device)
    return (index, cursors_of(slots), slots["drafts"], slots["block_table"], mtp_step, BLOCK_SIZE, END)


def cursors_of(slots: dict[str, torch.Tensor]) -> Cursors:
    return Cursors(slots["base"], slots["pos"], slots["last_token"])


def history_of(slots: dict[str, torch.Tensor]) -> History:
    return History(*(slots[name] for name in History._fields))


def accept_arguments(
    slots: dict[str, torch.Tensor],
    window: Window,
    order: list[int],
    mtp_step: int,
    hash_limit: int | None = None,
    forced_ids: torch.Tensor | None = None,
) -> tuple[Any, ...]:
    """Return arguments of accept_window: request b keeps b of its drafts, or all, if no id is forced.

    Samples after the first wrong draft may agree again. Row 2 b of request b, if there is one, has no token.
    """
    device = window.pos.device
    batch = len(order)
    drawn = torch.full((batch, mtp_step + 1), 77, device=device)
    drawn[:, :-1] = window.tokens.view(batch, -1)[:, 1:]
    for request in range(batch):
        if request % (mtp_step + 1) < mtp_step:
            drawn[request, request % (mtp_step + 1)] += 1
    index = torch.tensor(order, dtype=torch.int32, device=device)
    rows = torch.arange(mtp_step + 1, device=device)
    request = torch.arange(batch, device=device)[:, None]
    broken = torch.where(request % 2 == 0, NOT_FINITE, ALL_MASKED)
    outcome = torch.where(rows == 2 * request % (mtp_step + 3), broken, DRAWN).to(torch.uint8)
    sampled = (window.tokens, drawn.flatten(), outcome.flatten())
    commit = (index, window.pos, window.block_table, cursors_of(slots), history_of(slots))
    limit = None if hash_limit is None else torch.tensor([hash_limit], device=device)
    return (*sampled, *commit, mtp_step, BLOCK_SIZE, END, limit, forced_ids)


def make_forced(slots: dict[str, torch.Tensor], mtp_step: int) -> torch.Tensor:
    """Return forced ids [SLOTS, END]: of slots 1, 4, 7 everywhere, of 2, 5, 8 at two of three positions.

    Half of them are the ids of the slots' drafts, so that some drafts are right.
    """
    generator = torch.Generator().manual_seed(mtp_step)
    ids = torch.randint(1, 50, (SLOTS, END), generator=generator)
    for slot in range(1, SLOTS):
        for k, draft in enumerate(slots["drafts"][slot, :mtp_step].tolist()):
            position = int(slots["pos"][slot]) + 1 + k
            if position < END and (slot + k) % 4:
                ids[slot, position] = draft
    positions = torch.arange(END)
    for slot in range(SLOTS):
        if slot % 3 == 0:
            ids[slot] = -1
        elif slot % 3 == 2:
            ids[slot, positions % 3 == 2] = -1
    return ids.to(torch.int32).to(slots["pos"].device)


def make_lookup(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids [SLOTS, END], and match lengths of which every other one is above 0."""
    matched = torch.arange(SLOTS, dtype=torch.int32) % 2 * 5
    return torch.full((SLOTS, END), 99, dtype=torch.int32, device=device), matched.to(device)


def kv_index_of(table: list[int], position: int) -> tuple[int, int]:
    """Return the position, at most END - 1, and the KV index (-1: not written) of a wanted position."""
    inside = min(position, END - 1)
    block = table[inside // BLOCK_SIZE]
    is_written = position < END and block > 0
    return inside, block * BLOCK_SIZE + inside % BLOCK_SIZE if is_written else -1
