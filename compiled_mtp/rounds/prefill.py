"""Prefill: one launch processes chunks of several prompts."""

from __future__ import annotations

import torch

from compiled_mtp.models.rows import PrefillRows, place_prompt_chunks
from compiled_mtp.step import Step


def prefill(
    step: Step,
    token_ids: torch.Tensor,
    prompt_chunks: torch.Tensor,
    rotary_positions: torch.Tensor | None = None,
    is_image: torch.Tensor | None = None,
    features: torch.Tensor | None = None,
) -> torch.Tensor:
    """Process one chunk of each of P prompts.

    token_ids [T] int64. prompt_chunks [5, P] int64, one column per chunk: slot, position of its first token
    (a multiple of 64), number of tokens, row of its first token, and snapshot offset. The offset is 0 or, for
    one chunk, a multiple of 64: the last slot then receives what a state snapshot holds of the chunk's slot
    after that many of its tokens. First rows are multiples of PROMPT_CHUNK_MULTIPLE in ascending order; a
    chunk without tokens has slot 0 and comes last. A step with images also takes rotary_positions [2, 3, T]
    int64, those of the target's rows and of the draft's; and is_image [T] bool, the rows whose embeddings are
    their rows of features [T, H] in the weights' dtype. Returns the target's hidden states [T, H], defined in
    the chunks' rows. Mutates the caches, and the slots' base, pos and last_hidden.
    """
    slots = step.slots
    index, start, length, first_row, snapshot_offset = prompt_chunks.unbind()
    table = slots.block_table[index]
    prompt_chunk, before, positions, kv_slots = place_prompt_chunks(
        token_ids.shape[0], (start, length, first_row), table, step.kv_cache.block_size
    )
    inputs = token_ids
    if is_image is not None:
        assert features is not None
        inputs = torch.where(is_image[:, None], features, step.target.embed(token_ids))
    rows = PrefillRows(
        rotary_positions=positions if rotary_positions is None else rotary_positions[0],
        # A row of no chunk has the last position of the chunk before it, so it reads what that chunk wrote.
        causal_positions=positions,
        slot_mapping=kv_slots,
        block_table=table,
        state_index=index.to(torch.int32),
        start=start,
        length=length,
        first_row=first_row,
        snapshot_offset=snapshot_offset,
    )
    hidden = step.target(inputs, rows, step.kv_cache, step.state_cache, step.cos_sin)
    if step.draft is not None:
        # Entry j of the draft's KV is made of (token j, hidden j - 1). For the first token of a chunk that is
        # the hidden state that the prompt's chunk before it left in the slot.
        carried = torch.where(start[:, None] > 0, slots.last_hidden[index], 0.0)
        shifted = torch.cat((hidden[:1], hidden[:-1]))
        shifted = torch.where((before == 0)[:, None], carried[prompt_chunk], shifted)
        if rotary_positions is not None:
            # In text the position after the last token's is the row's own; at an image's end it is not.
            rows = rows.moved(rotary_positions[1], positions, kv_slots)
        step.draft_forward(inputs, shifted, rows)
    # Chunks without a snapshot write zeros to slot 0.
    snapshot_slot = torch.where(snapshot_offset > 0, slots.pos.shape[0] - 1, 0)
    for count, target in ((snapshot_offset, snapshot_slot), (length, index)):
        last = hidden.index_select(0, (first_row + count - 1).clamp(min=0))
        slots.last_hidden[target] = torch.where(count[:, None] > 0, last, 0.0)
    slots.base[index] = start + length
    slots.pos[index] = start + length
    return hidden
