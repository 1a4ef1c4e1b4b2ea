"""Slots at every stage of a request, and what read_window and accept_window make of them, one by one."""

from __future__ import annotations

from typing import Any

import torch

BLOCK_SIZE, BLOCKS, END = 16, 5, 75
SLOTS = 9
HASH_LIMIT = 40000


def make_slots(mtp_step: int, device: str) -> dict[str, torch.Tensor]:
    """Row 0 is padding; the others stand at the beginning, in mid-text, at a block's edge, near `END`, and
    before a block that is not reserved."""
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
    }
    made["last_token"][0] = made["drafts"][0] = 0
    return {name: tensor.to(device) for name, tensor in made.items()}


def read_arguments(slots: dict[str, torch.Tensor], order: list[int], mtp_step: int) -> tuple[Any, ...]:
    index = torch.tensor(order, dtype=torch.int32, device=slots["pos"].device)
    names = ("base", "pos", "last_token", "drafts", "block_table")
    return (index, *(slots[name] for name in names), mtp_step, BLOCK_SIZE, END)


def accept_arguments(
    slots: dict[str, torch.Tensor],
    window: tuple[torch.Tensor, ...],
    order: list[int],
    mtp_step: int,
    hash_limit: int,
) -> tuple[Any, ...]:
    """Request b keeps b of its drafts, or all; samples past the first wrong draft may agree again."""
    _, start, tokens, *_, table = window
    device = start.device
    batch = len(order)
    drawn = torch.full((batch, mtp_step + 1), 77, device=device)
    drawn[:, :-1] = tokens.view(batch, -1)[:, 1:]
    for request in range(batch):
        if request % (mtp_step + 1) < mtp_step:
            drawn[request, request % (mtp_step + 1)] += 1
    index = torch.tensor(order, dtype=torch.int32, device=device)
    cursors = (slots["base"], slots["pos"], slots["last_token"])
    return (tokens, drawn.flatten(), index, start, table, *cursors, mtp_step, BLOCK_SIZE, END, hash_limit)


def slot_of(table: list[int], position: int) -> tuple[int, int]:
    """Position and KV slot of a wanted position."""
    inside = min(position, END - 1)
    block = table[inside // BLOCK_SIZE]
    is_written = position < END and block > 0
    return inside, block * BLOCK_SIZE + inside % BLOCK_SIZE if is_written else -1
