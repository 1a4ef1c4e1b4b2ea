"""The first token of a prompt, drawn from the hidden state that its last chunk left in the slot."""

from __future__ import annotations

import torch

from compiled_mtp.models.rows import DecodeRows
from compiled_mtp.ops.features import ALL_MASKED, DRAWN, RECENT_IDS
from compiled_mtp.ops.window import committed_ids, place_chain, place_rows
from compiled_mtp.rounds.logprobs import filtered_logits
from compiled_mtp.step import DraftInputs, DraftRows, Step
from compiled_mtp.step_output import StepOutput


def first_token(step: Step, state_index: torch.Tensor, num_drafts: int) -> torch.Tensor:
    """Draw y_0 of prompts whose last chunks are processed, and draft from it for the first round.

    state_index [B] int32, 0 for padding. Returns a packed StepOutput with W = 1 and S = num_drafts, or,
    with lookup, as many drafts as a slot holds. Mutates the slots' last tokens, histories and drafts, and the
    draft's KV.
    """
    logits, positions = first_logits(step, state_index)
    return conclude_first(step, state_index, logits, positions, num_drafts)


def first_logits(step: Step, state_index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits [B, V] that y_0 is drawn from, and the positions [B] of y_0."""
    index = state_index.to(torch.int64)
    # Gather positions before the head, which is a fence: `sample` reads them early (see ops/sample).
    positions, hidden = step.slots.pos[index], step.slots.last_hidden[index]
    return step.target.logits(hidden), positions


def first_filtered(
    step: Step,
    state_index: torch.Tensor,
    logits: torch.Tensor,
    positions: torch.Tensor,
    masks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The logits [B, V] to which `conclude_first` adds noise for the same arguments; mutates nothing."""
    return filtered_logits(
        step,
        logits=logits,
        drafts=_no_drafts(positions),
        positions=positions,
        state_index=state_index,
        masks=masks,
    )


def conclude_first(
    step: Step,
    state_index: torch.Tensor,
    logits: torch.Tensor,
    positions: torch.Tensor,
    num_drafts: int,
    masks: torch.Tensor | None = None,
    *,
    is_given: bool = False,
) -> torch.Tensor:
    """Draw, commit and draft from the results of `first_logits`; return what `first_token` does.

    masks [B, words] int32 as `sample` takes them, None to allow every id. is_given: the whole output of every
    request is given, so nothing is drafted; ids 0 take the place of drafts.
    """
    slots = step.slots
    index = state_index.to(torch.int64)
    hidden = slots.last_hidden[index]
    token, outcome = step.draw(
        logits=logits,
        drafts=_no_drafts(positions),
        positions=positions,
        state_index=state_index,
        masks=masks,
    )
    if slots.forced_ids is not None:
        token = committed_ids(token[:, None], positions[:, None], index, slots.forced_ids).squeeze(1)
    # Padding gains no token.
    is_live = state_index > 0
    token = torch.where(is_live, token, 0)
    slots.last_token[index] = token
    # Write every slot's history; `sample` reads only those of requests with penalties or bad words.
    slots.output_counts[index, token] = slots.output_counts[index, token] + is_live
    slots.recent_ids[index, positions % RECENT_IDS] = token
    if slots.token_ids is not None:
        slots.token_ids[index, positions] = token.to(torch.int32)
    left = step.leave_nothing(state_index, num_drafts if is_given else 0)
    if step.draft is not None and not is_given:
        rows = rows_at(step, state_index, index, start=positions, count=1, base=positions)
        chain = place_chain(
            positions,
            mtp_step=num_drafts,
            end=step.max_model_len,
            block_table=rows.block_table,
            block_size=step.kv_cache.block_size,
        )
        draft_rows = DraftRows(token, hidden, rows, None, *chain)
        left = step.leave_drafts(DraftInputs(state_index, token, num_drafts, None, draft_rows))
    num_new = is_live.to(torch.int64)
    num_finite = torch.where(outcome == ALL_MASKED, -1, (outcome == DRAWN).to(torch.int64)) * num_new
    return StepOutput(num_new, num_finite, token[:, None], left.ids, left.matches).pack()


def rows_at(
    step: Step,
    state_index: torch.Tensor,
    index: torch.Tensor,
    start: torch.Tensor,
    count: int,
    base: torch.Tensor,
) -> DecodeRows:
    """Rows at positions start .. start + count - 1 of each request; start and base [B] int64.

    index: state_index as int64. At max_model_len positions are clamped and writes dropped; writes through
    block-table entries without a block are dropped too.
    """
    block_table = step.slots.block_table[index]
    positions, slot_mapping = place_rows(
        start, count, end=step.max_model_len, block_table=block_table, block_size=step.kv_cache.block_size
    )
    positions = positions.flatten()
    return DecodeRows(
        rotary_positions=step.rotary_positions(positions, state_index),
        causal_positions=positions,
        slot_mapping=slot_mapping.flatten(),
        block_table=block_table,
        state_index=state_index,
        start=start,
        base=base,
    )


def _no_drafts(positions: torch.Tensor) -> torch.Tensor:
    return positions.new_empty((positions.shape[0], 0))
