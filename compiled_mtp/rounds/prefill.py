"""Prompts: one launch processes pieces of several, side by side."""

from __future__ import annotations

import torch

from compiled_mtp.models.rows import PrefillRows, place_prompt_chunks
from compiled_mtp.step import Step


def prefill(step: Step, token_ids: torch.Tensor, prompt_chunks: torch.Tensor) -> torch.Tensor:
    """Process the next pieces of P prompts.

    token_ids [T] int64. pieces [5, P] int64, a column per piece: slot, position of its first token (a
    multiple of 64), number of tokens, row of its first token, and mark. mark is 0 or, for one piece, a
    multiple of 64: the last slot then receives the state that the piece's slot has after that many tokens of
    the piece, as far as a checkpoint holds it. First rows are multiples of PROMPT_CHUNK_MULTIPLE in ascending
    order; a piece without tokens has slot 0 and comes last. Returns the target's hidden states [T, H],
    defined in the pieces' rows. Mutates the caches, and the slots' base, pos and last_hidden.
    """
    slots = step.slots
    index, start, length, first_row, snapshot_offset = prompt_chunks.unbind()
    table = slots.block_table[index]
    prompt_chunk, before, positions, kv_slots = place_prompt_chunks(
        token_ids.shape[0], (start, length, first_row), table, step.kv_cache.block_size
    )
    rows = PrefillRows(
        # A row of no piece has the last position of the piece before it: it reads what that piece wrote.
        rotary_positions=positions,
        causal_positions=positions,
        slot_mapping=kv_slots,
        block_table=table,
        state_index=index.to(torch.int32),
        start=start,
        length=length,
        first_row=first_row,
        snapshot_offset=snapshot_offset,
    )
    hidden = step.target(token_ids, rows, step.kv_cache, step.state_cache, step.cos_sin)
    if step.draft is not None:
        # Entry j of the draft's KV is made of (token j, hidden j - 1): for the first token of a piece, the
        # hidden state that the piece before left in the slot.
        carried = torch.where(start[:, None] > 0, slots.last_hidden[index], 0.0)
        shifted = torch.cat((hidden[:1], hidden[:-1]))
        shifted = torch.where((before == 0)[:, None], carried[prompt_chunk], shifted)
        step.draft_forward(token_ids, shifted, rows)
    # Slot 0 receives zeros alone.
    marked = torch.where(snapshot_offset > 0, slots.pos.shape[0] - 1, 0)
    for count, target in ((snapshot_offset, marked), (length, index)):
        last = hidden.index_select(0, (first_row + count - 1).clamp(min=0))
        slots.last_hidden[target] = torch.where(count[:, None] > 0, last, 0.0)
    slots.base[index] = start + length
    slots.pos[index] = start + length
    return hidden
