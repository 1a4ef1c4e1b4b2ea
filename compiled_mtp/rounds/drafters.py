"""The drafters: who proposes the tokens that the next round verifies. Each is one record (`Drafter`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from compiled_mtp.cache.slot_tensors import SlotRow
from compiled_mtp.graphs.buckets import RoundShape
from compiled_mtp.ops.find_drafts import FIRST_CHAIN_KEPT, FIRST_THRESHOLD, LookupState, find_drafts
from compiled_mtp.ops.window import MAX_DRAFTS
from compiled_mtp.step import Drafter, DraftInputs, SlotSizes, Step
from compiled_mtp.step_output import LeftDrafts


def _draft_chain(step: Step, inputs: DraftInputs, drafts: torch.Tensor) -> LeftDrafts:
    """Write the draft's KV of the inputs, then draft d_1 .. d_S one after the other from the last tokens.

    The inputs (d_i, draft hidden before it), i < S, go past the accepted tokens; the next round overwrites
    them. The draft samples with the request's own noise, so it agrees with the target far more often than its
    argmax would (Daliri, Musco, Suresh, arXiv 2408.07978). Mutates the draft's KV.
    """
    if inputs.draft_rows is None:
        return LeftDrafts(drafts, None)
    tokens, hidden, rows, kept_rows, chain_positions, chain_slots = inputs.draft_rows
    if not inputs.num_drafts:
        step.write_draft_keys(tokens, hidden, rows)
        return LeftDrafts(drafts, None)
    token, batch, found = inputs.token, inputs.token.shape[0], [drafts]
    hidden = step.draft_forward(tokens, hidden, rows, kept_rows)
    for i in range(inputs.num_drafts):
        if i:
            # Draft i's input: the draft before it.
            positions = chain_positions[i - 1, :batch]
            rotary = step.rotary_positions(positions, rows.state_index)
            hidden = step.draft_forward(
                token, hidden, rows.moved(rotary, positions, chain_slots[i - 1, :batch])
            )
        # Drafts past max_model_len take the noise of the last position: no request has room for them.
        token = step.draw(
            logits=step.draft_logits(hidden),
            drafts=found[-1] if len(found) < 3 else torch.cat(found[1:], dim=1),
            positions=chain_positions[i, :batch],
            state_index=rows.state_index,
            column_ids=step.draft_ids,
        ).token
        found.append(token[:, None])
    return LeftDrafts(torch.cat(found, dim=1), None)


def _chain_rows(sizes: SlotSizes) -> tuple[SlotRow, ...]:
    """Deferred inputs, in rings by position mod mtp_step + 1: (token j, hidden j - 1) for the last
    num_deferred positions up to pos."""
    entries = sizes.mtp_step + 1
    return (
        SlotRow("num_deferred", (), torch.int64, 0),
        SlotRow("deferred_ids", (entries,), torch.int64, None),
        SlotRow("deferred_hidden", (entries, sizes.hidden_size), sizes.dtype, None),
    )


def _chain_shapes(depths: Sequence[int]) -> tuple[RoundShape, ...]:
    return tuple(RoundShape(depth, depth) for depth in depths)


def _look_up(step: Step, inputs: DraftInputs, drafts: torch.Tensor) -> LeftDrafts:
    """Leave each slot with drafts from its text where these are likelier than `drafts` [B, S].

    Mutates the slots' drafts and `LookupState`.
    """
    slots = step.slots
    assert slots.token_ids is not None
    assert slots.matched is not None
    assert slots.threshold is not None
    assert slots.chain_kept is not None
    found = find_drafts(
        slots.token_ids,
        state_index=inputs.state_index,
        pos=slots.pos,
        chain=drafts,
        lookup=LookupState(slots.matched, slots.threshold, slots.chain_kept),
        drafts=slots.drafts,
        accepted=inputs.accepted,
        early=inputs.draft_rows is not None,
    )
    return LeftDrafts(found.drafts, found.matches)


def _text_rows(sizes: SlotSizes) -> tuple[SlotRow, ...]:
    """The ids of prompt and output by position, and the fields of `LookupState`.

    Rows begin at multiples of 64 bytes: a search then loads four ids at a time.
    """
    return (
        SlotRow("token_ids", (-(-sizes.max_model_len // 16) * 16,), torch.int32, None),
        SlotRow("matched", (), torch.int32, 0),
        SlotRow("threshold", (), torch.int32, FIRST_THRESHOLD),
        SlotRow("chain_kept", (), torch.int32, FIRST_CHAIN_KEPT),
    )


def _wide_shapes(depths: Sequence[int]) -> tuple[RoundShape, ...]:
    return tuple(RoundShape(MAX_DRAFTS, depth) for depth in depths)


CHAIN = Drafter("mtp", _draft_chain, _chain_rows, _chain_shapes)
LOOKUP = Drafter("lookup", _look_up, _text_rows, _wide_shapes)


def choose_drafters(mtp_step: int, lookup: str) -> tuple[Drafter, ...]:
    """The drafters for `mtp_step` drafts of a chain and the setting `lookup`, in the order in which they are
    asked. A chain of none drafts nothing, and nothing is looked up beside it."""
    if not mtp_step:
        return ()
    return (CHAIN, LOOKUP) if lookup == "auto" else (CHAIN,)
