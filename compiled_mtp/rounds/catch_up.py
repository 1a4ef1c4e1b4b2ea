"""Catch-up: the draft model reads the inputs that rounds without drafts deferred, before it drafts again."""

from __future__ import annotations

import torch

from compiled_mtp.models.rows import DecodeRows
from compiled_mtp.ops.window import place_rows
from compiled_mtp.step import Step


def catch_up(step: Step, state_index: torch.Tensor) -> None:
    """Write the deferred draft inputs (token, hidden before it) into the draft's KV, as drafting rounds do.

    state_index [B] int32, 0 for padding. Mutates the draft's KV and the slots' num_deferred, which become 0.
    """
    slots, index = step.slots, state_index.to(torch.int64)
    pos, table = slots.pos[index], slots.block_table[index]
    # One ring entry per position pos - num_deferred + 1 .. pos; rows past these write nothing.
    width = slots.deferred_ids.shape[1]
    positions, kv_slots = place_rows(
        pos - slots.num_deferred[index] + 1,
        width,
        end=(pos + 1).clamp(max=step.max_model_len)[:, None],
        block_table=table,
        block_size=step.kv_cache.block_size,
    )
    entries = (index[:, None].expand(-1, width).flatten(), positions.flatten() % width)
    flat = positions.flatten()
    rows = DecodeRows(
        rotary_positions=step.rotary_positions(flat, state_index),
        causal_positions=flat,
        slot_mapping=kv_slots.flatten(),
        block_table=table,
        state_index=state_index,
        start=pos,
        base=pos,
    )
    step.write_draft_keys(slots.deferred_ids[entries], slots.deferred_hidden[entries], rows)
    slots.num_deferred[index] = torch.zeros_like(pos)
