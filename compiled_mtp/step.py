"""One decode round on the device, from cursors to new drafts. Read this first: `Step.decode` is one round.

Notation. A round of B requests (a bucket; padding rows last) verifies S1 = shape.verify drafts per request,
on W = S1 + 1 rows, and leaves S2 = shape.chain new drafts. Rows are request-major: row b * W + k. `pos` of a
request is the absolute position of its last token, which is emitted and not yet processed; `base` is the
position up to which its stored GDN state is folded.

Invariant: length, KV, conv inputs, GDN state and emitted ids of a request all advance by the same number of
tokens, num_accepted + 1. No line depends on a value on the host, so `torch.compile(fullgraph=True)` takes
each program whole.

What surrounds a round is in `rounds/`: prefill, first tokens, catch-up of the draft model, log probabilities,
and rounds in two phases.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from compiled_mtp.cache.kv_cache import KVCache
from compiled_mtp.cache.slot_state import SlotState
from compiled_mtp.cache.slot_tensors import SlotRow, SlotTensors
from compiled_mtp.cache.state_cache import StateCache
from compiled_mtp.graphs.buckets import RoundShape
from compiled_mtp.models.draft_weights import DraftHead
from compiled_mtp.models.mtp import DraftModel
from compiled_mtp.models.qwen3_5 import TargetModel
from compiled_mtp.models.rows import DecodeRows, Rows
from compiled_mtp.ops.linear import linear
from compiled_mtp.ops.linear_w4a16 import linear_w4a16
from compiled_mtp.ops.linear_w8a8 import linear_w8a8
from compiled_mtp.ops.quantize_rows import quantize_rows
from compiled_mtp.ops.sample import Sampled, SamplingTables, sample
from compiled_mtp.ops.window import (
    Accepted,
    Cursors,
    History,
    Window,
    accept_window,
    place_chain,
    read_window,
)
from compiled_mtp.step_output import NUM_MATCHES, LeftDrafts, pack_round


class DraftRows(NamedTuple):
    """What the draft model reads of a round, and where its chain goes.

    tokens [M] and hidden [M, H]: tokens drawn by the rows, and the target's hidden states before them; rows:
    where these M inputs go in the draft's KV; kept_rows [B] int64: the rows of the last tokens, None for all.
    chain_positions, chain_slots [>= S, >= B]: positions and KV indices of the next S drafts.
    """

    tokens: torch.Tensor
    hidden: torch.Tensor
    rows: Rows
    kept_rows: torch.Tensor | None
    chain_positions: torch.Tensor
    chain_slots: torch.Tensor


class DraftInputs(NamedTuple):
    """What drafters read once the tokens of B requests are committed.

    state_index [B]. token [B]: each request's last. num_drafts: S, of a chain. accepted [B, 2 + W]: `packed`
    of `accept_window`, None for a first token. draft_rows: None where the draft model's inputs are deferred.
    """

    state_index: torch.Tensor
    token: torch.Tensor
    num_drafts: int
    accepted: torch.Tensor | None
    draft_rows: DraftRows | None


class SlotSizes(NamedTuple):
    """What decides the size of a drafter's rows: the most drafts of a chain, positions of a text, columns and
    dtype of hidden states."""

    mtp_step: int
    max_model_len: int
    hidden_size: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Drafter:
    """A source of drafts; `rounds.drafters` has them all. No drafter decides a token.

    name: in the key of a graph cache. propose(step, inputs, drafts) returns drafts [B, S]: its own or
    `drafts`, which the drafter before it proposed ([B, 0] for the first drafter), with `matches` if it has
    stored them in the slots. rows(sizes): what it keeps of each request. shapes(depths): the rounds in which
    its drafts are verified, for chains of these depths.
    """

    name: str
    propose: Callable[[Step, DraftInputs, torch.Tensor], LeftDrafts]
    rows: Callable[[SlotSizes], tuple[SlotRow, ...]]
    shapes: Callable[[Sequence[int]], tuple[RoundShape, ...]]


class Step(nn.Module):
    """The models, their caches and the slots' rows, in one module so that the compiler sees every tensor at a
    static address.

    mtp_step is the largest number of drafts that a chain leaves; a round verifies at most as many as a slot
    holds. drafters: asked in this order. has_images: prompts may have images, so that rotary positions differ
    from absolute ones.
    """

    cos_sin: torch.Tensor
    draft_head: torch.Tensor | None
    draft_head_scale: torch.Tensor | None
    hash_limit: torch.Tensor | None
    draft_ids: torch.Tensor | None

    def __init__(
        self,
        target: TargetModel,
        draft: DraftModel | None,
        kv_cache: KVCache,
        state_cache: StateCache,
        slots: SlotState,
        cos_sin: torch.Tensor,
        mtp_step: int,
        num_valid_ids: int,
        max_model_len: int,
        synthetic_acceptance: float | None = None,
        draft_head: DraftHead | None = None,
        *,
        drafters: Sequence[Drafter] = (),
        has_images: bool = False,
    ) -> None:
        super().__init__()
        if mtp_step and draft is None:
            raise ValueError(
                f"mtp_step must be 0 without a draft model, got {mtp_step}; load the mtp.* tensors"
            )
        self.target = target
        self.draft = draft
        self.kv_cache = kv_cache
        self.state_cache = state_cache
        self.slots = slots
        self.slot_tensors = SlotTensors([*slots.slot_tensors(), *state_cache.slot_tensors()])
        self.register_buffer("cos_sin", cos_sin)
        self.mtp_step = mtp_step
        self.drafters = tuple(drafters)
        self.has_images = has_images
        self.num_valid_ids = min(num_valid_ids, slots.bias.shape[1])
        self.max_model_len = max_model_len
        # Benchmarks only: rounds accept drafts at this rate, whatever the drafts are.
        is_synthetic = synthetic_acceptance is not None
        self.register_buffer("hash_limit", slots.pos.new_zeros(1) if is_synthetic else None)
        if synthetic_acceptance is not None:
            self.accept_at(synthetic_acceptance)
        head = DraftHead() if draft_head is None else draft_head
        self.register_buffer("draft_head", head.weight)
        self.register_buffer("draft_head_scale", head.scale)
        self.register_buffer("draft_ids", head.ids)
        self.quantizes_draft_rows = head.quantizes_rows

    def accept_at(self, rate: float | None) -> None:
        """Accept drafts at another synthetic rate from the next launch on; None compares them again.

        Requires a step made with a rate; compiled code stays valid. Mutates hash_limit.
        """
        assert self.hash_limit is not None
        self.hash_limit.fill_(-1 if rate is None else round(rate * 2**16))

    def decode(self, state_index: torch.Tensor, shape: RoundShape) -> torch.Tensor:
        """Run one round: verify the first S1 drafts of each request, emit its new tokens, leave S2 drafts.

        state_index [B] int32: the requests' slots, 0 for padding. Returns a packed StepOutput of W tokens and
        S2 drafts per request. Mutates the caches and the slots' cursors, last tokens, histories and drafts:
        S2 ids, then zeros; with lookup, all of them may be ids from the request's text instead, and the
        output has as many drafts as a slot holds. A round without drafts (S1 = S2 = 0) defers the draft
        model's inputs: run `catch_up` before a slot's ring of them is full, and before the next round with
        drafts.
        """
        # 1. Read the window: last token and drafts [t, d_1 .. d_S1] at positions pos .. pos + S1.
        window = self.read_window(state_index=state_index, shape=shape)

        # 2. Verify: one forward of the target over all B * W rows.
        hidden, logits = self.verify(state_index=state_index, window=window)

        # 3. Draw y_k from row k: the request's token at pos + k + 1 if its first k drafts are right.
        sampled = self.draw_window(logits=logits, state_index=state_index, window=window)

        # 4. Accept the leading drafts with d_k == y_{k-1}; the y after them is the bonus token. Commit: base
        #    becomes pos if the verify stored the states, and pos moves past the new tokens.
        accepted = self.accept_and_commit(state_index=state_index, window=window, sampled=sampled)

        # 5. Make the draft's KV true for every row, then draft d_1 .. d_S2 from the bonus token: the chain,
        #    then the other drafters (rounds/drafters.py).
        left = self.extend_and_draft(
            state_index=state_index,
            window=window,
            tokens=self.round_tokens(sampled, accepted),
            hidden=hidden,
            accepted=accepted,
            shape=shape,
        )

        # 6. Pack new tokens and drafts into one tensor for one copy to the host.
        return pack_round(accepted=accepted, left=left)

    def read_window(self, state_index: torch.Tensor, shape: RoundShape) -> Window:
        """1. The W rows of each request, from the slots' cursors, drafts and block tables."""
        return read_window(
            state_index,
            cursors=self._cursors(),
            drafts=self.slots.drafts,
            block_table=self.slots.block_table,
            mtp_step=shape.verify,
            block_size=self.kv_cache.block_size,
            end=self.max_model_len,
        )

    def verify(self, state_index: torch.Tensor, window: Window) -> tuple[torch.Tensor, torch.Tensor]:
        """2. Run the target over a window: hidden [B * W, H] and logits [B * W, V].

        Mutates the target's KV and the recurrent states; the GDN layers fold their state up to `pos`.
        """
        rows = _decode_rows(state_index, window, self.rotary_positions(window.positions, state_index))
        hidden = self.target(window.tokens, rows, self.kv_cache, self.state_cache, self.cos_sin)
        return hidden, self.target.logits(hidden)

    def draw_window(
        self,
        logits: torch.Tensor,
        state_index: torch.Tensor,
        window: Window,
        masks: torch.Tensor | None = None,
    ) -> Sampled:
        """3. Draw a token from each row of a window, and say whether the row could be drawn from.

        masks [B * W, words] int32 as `sample` takes them, None to allow every id.
        """
        return self.draw(
            logits=logits,
            drafts=window.tokens.view(state_index.shape[0], -1)[:, 1:],
            positions=window.sampled_positions,
            state_index=state_index,
            masks=masks,
        )

    def accept_and_commit(self, state_index: torch.Tensor, window: Window, sampled: Sampled) -> Accepted:
        """4. Accept drafts and move the cursors, in one launch. Mutates the slots' cursors, last tokens and
        histories."""
        slots = self.slots
        return accept_window(
            window.tokens,
            sampled=sampled.token,
            outcome=sampled.outcome,
            state_index=state_index,
            start=window.pos,
            table=window.block_table,
            cursors=self._cursors(),
            history=History(slots.features, slots.output_counts, slots.recent_ids),
            mtp_step=window.tokens.shape[0] // window.pos.shape[0] - 1,
            block_size=self.kv_cache.block_size,
            end=self.max_model_len,
            hash_limit=self.hash_limit,
            forced_ids=self.slots.forced_ids,
            token_ids=self.slots.token_ids,
            matched=self.slots.matched,
            max_unfolded=self.state_cache.max_unfolded,
        )

    def round_tokens(self, sampled: Sampled, accepted: Accepted) -> torch.Tensor:
        """The tokens [B * W] of a round's rows: its samples, or the ids forced in their place."""
        return sampled.token if self.slots.forced_ids is None else accepted.packed[:, 2:].flatten()

    def extend_and_draft(
        self,
        state_index: torch.Tensor,
        window: Window,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
        accepted: Accepted,
        shape: RoundShape,
    ) -> LeftDrafts:
        """5. Write each row's input (drawn token, hidden before it) into the draft's KV and draft S2 tokens.

        tokens [B * W], hidden [B * W, H]. Returns the drafts of the next round. Mutates the draft's KV and
        the slots' drafts or deferred draft inputs.
        """
        if self.draft is None:
            return LeftDrafts(tokens.new_empty((state_index.shape[0], 0)), None)
        inputs = DraftInputs(state_index, accepted.bonus, shape.chain, accepted.packed, None)
        if shape.verify == shape.chain == 0:
            self._defer_draft_inputs(state_index, window, tokens, hidden, accepted)
            return self.leave_drafts(inputs)
        rotary = self.rotary_positions(accepted.positions, state_index)
        rows = _decode_rows(state_index, window, rotary)
        chain = (accepted.chain_positions, accepted.chain_slots)
        if shape.chain > chain[0].shape[0]:
            # `accept_window` gives the positions of a chain of S1 drafts; a deeper one needs its own.
            chain = place_chain(
                window.pos + accepted.packed[:, 0],
                mtp_step=shape.chain,
                end=self.max_model_len,
                block_table=window.block_table,
                block_size=self.kv_cache.block_size,
            )
        draft_rows = DraftRows(
            tokens=tokens,
            hidden=hidden,
            rows=rows.moved(rotary, accepted.positions, accepted.kv_slots),
            kept_rows=accepted.accepted_row,
            chain_positions=chain[0],
            chain_slots=chain[1],
        )
        return self.leave_drafts(inputs._replace(draft_rows=draft_rows))

    def draw(
        self,
        logits: torch.Tensor,
        drafts: torch.Tensor,
        positions: torch.Tensor,
        state_index: torch.Tensor,
        column_ids: torch.Tensor | None = None,
        masks: torch.Tensor | None = None,
    ) -> Sampled:
        """Call `sample` with the sampling parameters of the requests; the other arguments are as there."""
        return sample(
            logits,
            drafts=drafts,
            positions=positions,
            state_index=state_index,
            tables=self.sampling_tables(),
            num_valid_ids=self.num_valid_ids,
            column_ids=column_ids,
            masks=masks,
        )

    def draft_forward(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        rows: Rows,
        kept_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the draft model on inputs (token, hidden before it) of M rows; mutates its KV.

        token_ids [M], or the tokens' embeddings [M, H]. Returns hidden [M, H], or the hidden states of
        kept_rows alone.
        """
        assert self.draft is not None
        assert self.kv_cache.draft is not None
        table, ids = self.target.embed.table_for(token_ids)
        return self.draft(table, ids, hidden, rows, self.kv_cache.draft, self.cos_sin, kept_rows)

    def write_draft_keys(self, token_ids: torch.Tensor, hidden: torch.Tensor, rows: Rows) -> None:
        """Write the draft's KV of inputs as `draft_forward` does, and compute nothing else."""
        assert self.draft is not None
        assert self.kv_cache.draft is not None
        table, ids = self.target.embed.table_for(token_ids)
        self.draft.write_keys(table, ids, hidden, rows, self.kv_cache.draft, self.cos_sin)

    def draft_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 logits [M, n] of the draft model's output [M, H], one for each row of the draft's head."""
        head, scale = self.draft_head, self.draft_head_scale
        if head is None:
            return self.target.logits(hidden)
        if self.quantizes_draft_rows:
            logits = linear_w8a8(*quantize_rows(hidden), head, scale, True)
        elif scale is not None and head.dtype == torch.int16:
            logits = linear_w4a16(hidden, head, scale, True)
        else:
            logits = linear(hidden, head, scale, True)
        # With draft_vocab every rank holds this head whole.
        communicator = self.target.communicator if self.draft_ids is None else None
        return logits if communicator is None else communicator.gather_columns(logits)

    def leave_drafts(self, inputs: DraftInputs) -> LeftDrafts:
        """Ask the drafters in turn, and leave the slots with what the last one gives.

        Mutates the slots' drafts, and what the drafters keep.
        """
        left = LeftDrafts(inputs.token[:, None][:, :0], None)
        for drafter in self.drafters:
            left = drafter.propose(self, inputs, left.ids)
        return self.store_drafts(inputs.state_index, left.ids) if left.matches is None else left

    def leave_nothing(self, state_index: torch.Tensor, num_drafts: int) -> LeftDrafts:
        """Return ids 0 in the place of drafts [B, num_drafts]; mutates nothing."""
        ids = self.slots.pos.new_zeros((state_index.shape[0], num_drafts))
        matches = None if self.slots.matched is None else ids.new_zeros((ids.shape[0], NUM_MATCHES))
        return LeftDrafts(ids, matches)

    def store_drafts(self, state_index: torch.Tensor, drafts: torch.Tensor) -> LeftDrafts:
        """Write a chain's drafts [B, S] into the slots and return them; for slots without looked-up drafts.

        The slots' other drafts become id 0: a deeper round then verifies drafts that the host knows too.
        Padding keeps zeros.
        """
        is_live = state_index > 0
        missing = drafts.new_zeros((drafts.shape[0], self.slots.drafts.shape[1] - drafts.shape[1]))
        row = torch.cat((drafts, missing), dim=1)
        index = state_index.to(torch.int64)
        self.slots.drafts[index] = torch.where(is_live[:, None], row, 0)
        return LeftDrafts(drafts, None)

    def sampling_tables(self) -> SamplingTables:
        """The slots' sampling parameters, as `sample` and `filter_logits` take them."""
        return SamplingTables(*[getattr(self.slots, name) for name in SamplingTables._fields])

    def _defer_draft_inputs(
        self,
        state_index: torch.Tensor,
        window: Window,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
        accepted: Accepted,
    ) -> None:
        """Store the draft inputs of a round of one row per request for `catch_up`.

        Mutates the slots' rings of deferred inputs.
        """
        slots, index = self.slots, state_index.to(torch.int64)
        entry = (index, (window.pos + 1) % slots.deferred_ids.shape[1])
        slots.deferred_ids[entry] = tokens
        slots.deferred_hidden[entry] = hidden
        # Padding gains no token.
        slots.num_deferred[index] = slots.num_deferred[index] + accepted.packed[:, 0]

    def rotary_positions(self, positions: torch.Tensor, state_index: torch.Tensor) -> torch.Tensor:
        """The rotary positions, equal on all axes, of generated tokens at absolute `positions` [B * n].

        Rows are request-major; state_index [B].
        """
        if not self.has_images:
            return positions
        delta = self.slots.rotary_delta[state_index.to(torch.int64)]
        return (positions.view(state_index.shape[0], -1) + delta[:, None]).flatten()

    def _cursors(self) -> Cursors:
        return Cursors(self.slots.base, self.slots.pos, self.slots.last_token)


def _decode_rows(state_index: torch.Tensor, window: Window, rotary_positions: torch.Tensor) -> DecodeRows:
    return DecodeRows(
        rotary_positions=rotary_positions,
        causal_positions=window.positions,
        slot_mapping=window.kv_slots,
        block_table=window.block_table,
        state_index=state_index,
        start=window.pos,
        base=window.base,
    )
