"""A token's whole life on the device. Read this first: `Step.decode` is one round.

Notation: a round verifies S1 = shape.verify drafts, on W = S1 + 1 rows a request, and makes S2 = shape.chain
new ones; B requests of a bucket. `pos` of a request is the absolute position of its last token, which is
emitted but not yet processed; `base` is the position up to which its stored GDN state is folded. Rows are
request-major: row b * W + k.

The one invariant: length, KV, conv inputs, GDN state and emitted ids all advance by the same num_accepted +
1. Nothing here depends on a value on the host, so that `torch.compile(fullgraph=True)` takes each step
whole.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import nn

from compiled_mtp.cache.kv_cache import KVCache
from compiled_mtp.cache.slot_sampling import PROCESSED_LOGPROBS
from compiled_mtp.cache.slot_state import SlotState
from compiled_mtp.cache.slot_tensors import SlotTensors
from compiled_mtp.cache.state_cache import StateCache
from compiled_mtp.graphs.buckets import RoundShape
from compiled_mtp.models.draft_head import DraftHead
from compiled_mtp.models.mtp import DraftModel
from compiled_mtp.models.qwen3_5 import TargetModel
from compiled_mtp.models.rows import DecodeRows, PrefillRows, Rows, place_pieces
from compiled_mtp.ops.features import ALL_MASKED, DRAWN, RECENT_IDS
from compiled_mtp.ops.linear import linear
from compiled_mtp.ops.row_logprobs import row_logprobs
from compiled_mtp.ops.sample import Sampled, SamplingTables, filter_logits, sample
from compiled_mtp.ops.window import (
    Accepted,
    Cursors,
    History,
    Window,
    accept_window,
    place_chain,
    place_rows,
    read_window,
)
from compiled_mtp.rounds.output import StepOutput, pack_logprobs

SamplingArguments: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor, SamplingTables, int]
"""drafts, positions, state_index, tables, num_valid_ids: of `sample`, after its logits."""


class Step(nn.Module):
    """Models, caches and slot rows, bound together so that the compiler sees their buffers at static
    addresses.

    mtp_step is the most drafts that a round verifies or makes. The buffers between the halves of rounds are
    empty until `reserve_halves`.
    """

    cos_sin: torch.Tensor
    draft_head: torch.Tensor | None
    draft_head_scale: torch.Tensor | None
    hash_limit: torch.Tensor | None
    draft_ids: torch.Tensor | None
    verified_hidden: torch.Tensor
    verified_logits: torch.Tensor
    masks: torch.Tensor

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
        self.num_valid_ids = num_valid_ids
        self.max_model_len = max_model_len
        # Benchmarks only: drafts are kept at that rate, whatever they are. Rounds read it when they run.
        is_synthetic = synthetic_acceptance is not None
        self.register_buffer("hash_limit", slots.pos.new_zeros(1) if is_synthetic else None)
        if synthetic_acceptance is not None:
            self.accept_at(synthetic_acceptance)
        head = DraftHead() if draft_head is None else draft_head
        self.register_buffer("draft_head", head.weight)
        self.register_buffer("draft_head_scale", head.scale)
        self.register_buffer("draft_ids", head.ids)
        self.reserve_halves(0)

    def accept_at(self, rate: float | None) -> None:
        """Keep drafts at another synthetic rate, None for what they are worth, from the next launch on.

        For a step that was made with a rate; compiled code stays as it is. Mutates hash_limit.
        """
        assert self.hash_limit is not None
        self.hash_limit.fill_(-1 if rate is None else round(rate * 2**16))

    def reserve_halves(self, rows: int) -> None:
        """Make the buffers between the halves of rounds of up to `rows` rows, and their masks, anew."""
        like, vocab_size = self.slots.last_hidden, self.target.vocab_size
        hidden_size = like.shape[1]
        made = {
            "verified_hidden": like.new_zeros((rows, hidden_size)),
            # A bit an id, as `sample` takes them; whoever launches an accept writes the rows that it reads.
            "masks": like.new_full((rows, -(-vocab_size // 32)), -1, dtype=torch.int32),
        }
        for name in Window._fields:
            row = self.slots.block_table if name == "block_table" else self.slots.pos
            made[f"verified_{name}"] = row.new_zeros((rows, *row.shape[1:]))
        # Whether there are enough rows is asked of the logits: they come last, an interrupt may come between.
        made["verified_logits"] = like.new_zeros((rows, vocab_size), dtype=torch.float32)
        # All or none: memory may have run out.
        for name, buffer in made.items():
            self.register_buffer(name, buffer)
        self.between_halves = frozenset(made)

    def decode(self, state_index: torch.Tensor, shape: RoundShape) -> torch.Tensor:
        """One round: verify the S1 first drafts of each request and leave S2 new ones.

        state_index [B] int32, 0 for padding. Returns a packed StepOutput with W = S1 + 1 and S = S2. Mutates
        the caches and the slots' cursors, last tokens and drafts: S2, then ids 0. A round without any (S1 =
        S2 = 0) keeps for the draft model what it will need to draft again: `catch_up` must come before more
        such rounds than a slot has room for, and before a round with drafts.
        """
        window = self.read_window(state_index, shape)
        hidden, logits = self.verify(state_index, window)
        return self._conclude(state_index, window, hidden, logits, shape)

    def catch_up(self, state_index: torch.Tensor) -> None:
        """Write the pairs that rounds without drafts have kept into the draft's KV, as they would have.

        state_index [B] int32, 0 for padding. Mutates the draft's KV and the slots' num_kept.
        """
        assert self.draft is not None
        assert self.kv_cache.draft is not None
        slots, index = self.slots, state_index.to(torch.int64)
        pos, table = slots.pos[index], slots.block_table[index]
        first, width = pos - slots.num_kept[index] + 1, slots.kept_ids.shape[1]
        end = (pos + 1).clamp(max=self.max_model_len)[:, None]
        positions, kv_slots = place_rows(first, width, end, table, self.kv_cache.block_size)
        places = (index[:, None].expand(-1, width).flatten(), positions.flatten() % width)
        flat = (positions.flatten(), positions.flatten(), kv_slots.flatten())
        rows = DecodeRows(*flat, table, state_index, start=pos, base=pos)
        pairs = (slots.kept_ids[places], slots.kept_hidden[places])
        kv = self.kv_cache.draft
        self.draft.write_keys(self.target.embed.weight, *pairs, rows, kv, self.cos_sin)
        slots.num_kept[index] = torch.zeros_like(pos)

    def verify_half(self, state_index: torch.Tensor, shape: RoundShape) -> None:
        """The first half of `decode`: leaves window, hidden states and logits in buffers that other launches
        keep."""
        window = self.read_window(state_index, shape)
        # Before the forward, whose head is a fence: sampling and accepting read a window early, so that
        # the second half, which has no product before them, cannot read it anew.
        for kept, part in zip(self._verified_window(len(state_index), shape), window, strict=True):
            kept.copy_(part)
        hidden, logits = self.verify(state_index, window)
        self.verified_hidden[: hidden.shape[0]] = hidden
        self.verified_logits[: logits.shape[0]] = logits

    def accept_half(self, state_index: torch.Tensor, shape: RoundShape) -> torch.Tensor:
        """The second half of `decode`, of the round that `verify_half` has left; returns what `decode` does.

        The requests of state_index must be those of that round, and as they were then.
        """
        window = self._verified_window(len(state_index), shape)
        rows = window.tokens.shape[0]
        hidden, logits = self.verified_hidden[:rows], self.verified_logits[:rows]
        return self._conclude(state_index, window, hidden, logits, shape, self.masks[:rows])

    def filter_half(self, state_index: torch.Tensor, shape: RoundShape) -> torch.Tensor:
        """Between the halves: what `accept_half` will add its noise to, [B * W, V]; mutates nothing."""
        window = self._verified_window(len(state_index), shape)
        rows = window.tokens.shape[0]
        logits, masks = self.verified_logits[:rows], self.masks[:rows]
        return filter_logits(logits, *self._sampling(window, state_index), None, masks)

    def _verified_window(self, batch: int, shape: RoundShape) -> Window:
        """What the buffers between the halves hold of the window of a round of `batch` requests."""
        rows = batch * (shape.verify + 1)
        lengths = {"base": batch, "pos": batch, "block_table": batch}
        kept = {name: getattr(self, f"verified_{name}") for name in Window._fields}
        return Window(**{name: buffer[: lengths.get(name, rows)] for name, buffer in kept.items()})

    def _conclude(
        self,
        state_index: torch.Tensor,
        window: Window,
        hidden: torch.Tensor,
        logits: torch.Tensor,
        shape: RoundShape,
        masks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """What follows the forward of a round."""
        sampled = sample(logits, *self._sampling(window, state_index), None, masks)
        accepted = self.accept_and_commit(state_index, window, sampled)
        drafts = self.extend_and_draft(state_index, window, sampled.token, hidden, accepted, shape)
        head = accepted.packed
        return StepOutput(head[:, 0], head[:, 1], head[:, 2:], drafts).pack()

    def read_window(self, state_index: torch.Tensor, shape: RoundShape) -> Window:
        """The W rows of each request, from the slots' cursors and drafts."""
        slots = self.slots
        place = (shape.verify, self.kv_cache.block_size, self.max_model_len)
        return read_window(state_index, self._cursors(), slots.drafts, slots.block_table, *place)

    def verify(self, state_index: torch.Tensor, window: Window) -> tuple[torch.Tensor, torch.Tensor]:
        """1. One forward of the target over [last token, d_1 .. d_S1] at positions p .. p + S1.

        Returns hidden [B * W, H] and logits [B * W, V]. The GDN layers fold their state up to `pos`.
        """
        rows = self._decode_rows(state_index, window)
        hidden = self.target(window.tokens, rows, self.kv_cache, self.state_cache, self.cos_sin)
        return hidden, self.target.logits(hidden)

    def _sampling(self, window: Window, state_index: torch.Tensor) -> SamplingArguments:
        """2. Draw y_k [M] from each row of logits, and say whether it could be.

        It is the request's token at position p + k + 1, given that the k drafts before it are right. These
        are the arguments of `sample` for a window.
        """
        drafts = window.tokens.view(state_index.shape[0], -1)[:, 1:]
        return self._sampling_of(drafts, window.sampled_positions, state_index)

    def _sampling_of(
        self, drafts: torch.Tensor, positions: torch.Tensor, state_index: torch.Tensor
    ) -> SamplingArguments:
        slots = self.slots
        tables = SamplingTables(*[getattr(slots, name) for name in SamplingTables._fields])
        num_valid_ids = min(self.num_valid_ids, tables.bias.shape[1])
        return drafts, positions, state_index, tables, num_valid_ids

    def accept_and_commit(self, state_index: torch.Tensor, window: Window, sampled: Sampled) -> Accepted:
        """3. Accept the leading drafts that agree with what was sampled; y_{num_accepted} is the bonus token.
        4. Commit: base becomes the old pos, pos and the last token move past the new tokens. One launch.
        """
        num_drafts = window.tokens.shape[0] // window.pos.shape[0] - 1
        place = (num_drafts, self.kv_cache.block_size, self.max_model_len)
        return accept_window(
            window.tokens,
            sampled.token,
            sampled.outcome,
            state_index,
            window.pos,
            window.block_table,
            self._cursors(),
            History(self.slots.features, self.slots.output_counts, self.slots.recent_ids),
            *place,
            self.hash_limit,
        )

    def extend_and_draft(
        self,
        state_index: torch.Tensor,
        window: Window,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
        accepted: Accepted,
        shape: RoundShape,
    ) -> torch.Tensor:
        """5. Make the draft's KV true for every row, then draft S2 tokens [B, S2] from the accepted one."""
        if self.draft is None:
            return tokens.new_empty((state_index.shape[0], 0))
        if not shape.chain and tokens.shape[0] == state_index.shape[0]:
            return self._keep_pairs(state_index, window, tokens, hidden, accepted)
        rows = self._decode_rows(state_index, window).moved(accepted.positions, accepted.kv_slots)
        drafted = self._draft_forward(tokens, hidden, rows, accepted.accepted_row)
        chain = (accepted.chain_positions, accepted.chain_slots)
        if shape.chain > chain[0].shape[0]:
            # The operator places a chain as deep as the window.
            end = window.pos + accepted.packed[:, 0]
            place = (self.max_model_len, window.block_table, self.kv_cache.block_size)
            chain = place_chain(end, shape.chain, *place)
        drafts = self._draft_chain(drafted, accepted.bonus, rows, *chain, shape.chain)
        return self._keep_drafts(state_index, drafts)

    def prefill(self, token_ids: torch.Tensor, pieces: torch.Tensor) -> torch.Tensor:
        """Process the next pieces of P prompts, side by side.

        token_ids [T] int64; pieces [5, P] int64, a column each: slot, position of the first token (a multiple
        of 64), number of tokens, the row of the first, and 0 or, of one piece, a multiple of 64: behind so
        many of its tokens the last slot is left as this slot then is, as far as a checkpoint has it. Rows are
        multiples of PIECE_MULTIPLE and never fall; a piece without tokens is of slot 0, and behind all
        others. Returns the target's hidden states [T, H], which mean something in the pieces' rows. Mutates
        the caches, and the slots' base, pos and last_hidden.
        """
        slots = self.slots
        index, start, length, first_row, mark = pieces.unbind()
        table, cut = slots.block_table[index], (start, length, first_row)
        place = place_pieces(token_ids.shape[0], cut, table, self.kv_cache.block_size)
        piece, before, positions, kv_slots = place
        state_index = index.to(torch.int32)
        # What no row writes is read by none: a row of nobody has the last position of the piece before it.
        at = (positions, positions, kv_slots, table, state_index, start)
        rows = PrefillRows(*at, length=length, first_row=first_row, mark=mark)
        hidden = self.target(token_ids, rows, self.kv_cache, self.state_cache, self.cos_sin)
        if self.draft is not None:
            # Slot j of the draft's KV is the pair (token j, hidden j - 1): the first hidden of a piece is the
            # one that the piece before has left.
            carried = torch.where(start[:, None] > 0, slots.last_hidden[index], 0.0)
            shifted = torch.cat((hidden[:1], hidden[:-1]))
            shifted = torch.where((before == 0)[:, None], carried[piece], shifted)
            self._draft_forward(token_ids, shifted, rows)
        # Nothing goes to slot 0 but zeros.
        marked = torch.where(mark > 0, slots.pos.shape[0] - 1, 0)
        for count, target in ((mark, marked), (length, index)):
            last = hidden.index_select(0, (first_row + count - 1).clamp(min=0))
            slots.last_hidden[target] = torch.where(count[:, None] > 0, last, 0.0)
        slots.base[index] = start + length
        slots.pos[index] = start + length
        return hidden

    def first_token(self, state_index: torch.Tensor, num_drafts: int) -> torch.Tensor:
        """Sample y_0 after the last pieces of prompts and draft from it: the first round is a real one.

        state_index [B] int32, 0 for padding. Returns a packed StepOutput with W = 1 and S = num_drafts.
        Mutates the slots' last token, first drafts and history, and the draft's KV.
        """
        logits, sampling = self.first_logits(state_index)
        return self.conclude_first(state_index, logits, sampling, num_drafts)

    def first_logits(self, state_index: torch.Tensor) -> tuple[torch.Tensor, SamplingArguments]:
        """The logits [B, V] that y_0 is drawn from, and what else it is drawn with."""
        index = state_index.to(torch.int64)
        # Read before the head: see ops/sample for what must be older than it.
        pos, hidden = self.slots.pos[index], self.slots.last_hidden[index]
        sampling = self._sampling_of(pos.new_empty((pos.shape[0], 0)), pos, state_index)
        return self.target.logits(hidden), sampling

    def conclude_first(
        self,
        state_index: torch.Tensor,
        logits: torch.Tensor,
        sampling: SamplingArguments,
        num_drafts: int,
        masks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """What follows `first_logits`; masks as `sample` takes them. Returns what `first_token` does."""
        slots = self.slots
        index = state_index.to(torch.int64)
        hidden, pos = slots.last_hidden[index], sampling[1]
        token, outcome = sample(logits, *sampling, None, masks)
        # Padding gains no token.
        is_live = state_index > 0
        token = torch.where(is_live, token, 0)
        slots.last_token[index] = token
        # Nobody reads it of a slot that has no use for it.
        slots.output_counts[index, token] = slots.output_counts[index, token] + is_live
        slots.recent_ids[index, pos % RECENT_IDS] = token
        drafts = token.new_empty((token.shape[0], 0))
        if self.draft is not None:
            rows = self._rows(state_index, index, pos, 1, pos)
            drafted = self._draft_forward(token, hidden, rows)
            chain = place_chain(
                pos, num_drafts, self.max_model_len, rows.block_table, self.kv_cache.block_size
            )
            drafts = self._draft_chain(drafted, token, rows, *chain, num_drafts)
            drafts = self._keep_drafts(state_index, drafts)
        num_new = is_live.to(torch.int64)
        num_finite = torch.where(outcome == ALL_MASKED, -1, (outcome == DRAWN).to(torch.int64)) * num_new
        return StepOutput(num_new, num_finite, token[:, None], drafts).pack()

    def logprobs(
        self,
        packed: torch.Tensor,
        state_index: torch.Tensor,
        raw: torch.Tensor,
        filtered: torch.Tensor | None,
    ) -> torch.Tensor:
        """`packed` with the log probabilities of its tokens: of rows [B * W, V] the raw logits or, for
        requests that ask for it, the filtered ones; None where nobody does."""
        rows, num_tokens = raw, raw.shape[0] // state_index.shape[0]
        if filtered is not None:
            features = self.slots.features[state_index.to(torch.int64)]
            is_processed = (features & PROCESSED_LOGPROBS) != 0
            rows = torch.where(is_processed.repeat_interleave(num_tokens)[:, None], filtered, raw)
        chosen = packed[:, 2 : 2 + num_tokens].reshape(-1).contiguous()
        num_valid_ids = min(self.num_valid_ids, raw.shape[1])
        return pack_logprobs(packed, row_logprobs(rows, chosen, num_valid_ids))

    def _draft_forward(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        rows: Rows,
        kept_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert self.draft is not None
        assert self.kv_cache.draft is not None
        table = self.target.embed.weight
        return self.draft(table, token_ids, hidden, rows, self.kv_cache.draft, self.cos_sin, kept_rows)

    def _draft_chain(
        self,
        hidden: torch.Tensor,
        token: torch.Tensor,
        rows: Rows,
        chain_positions: torch.Tensor,
        chain_slots: torch.Tensor,
        num_drafts: int,
    ) -> torch.Tensor:
        """Draft d_1 .. d_S [B, S] from the draft's hidden [B, H] of the pair at slot `pos`, the last `token`
        [B]; S = num_drafts.

        Writes the pairs (d_i, previous draft hidden) at slots pos + i for i < S, which chain_slots
        [>= S, >= B] names, past the accepted tail, where the next extend overwrites them. The draft samples
        with the request's own noise: it then agrees with the target far more often than its argmax would
        (Daliri, Musco, Suresh, arXiv 2408.07978).
        """
        drafts, batch = [token[:, None][:, :0]], hidden.shape[0]
        head = self.draft_head
        for i in range(num_drafts):
            if i:
                # The pair of the draft before.
                chained = rows.moved(chain_positions[i - 1, :batch], chain_slots[i - 1, :batch])
                hidden = self._draft_forward(token, hidden, chained)
            if head is None or self.draft_ids is None:
                logits = self.target.logits(hidden, head, self.draft_head_scale)
            else:
                # Whole on every rank.
                logits = linear(hidden, head, self.draft_head_scale, True, False)
            # Drafts past max_model_len take the last position's noise: no request has room for them.
            before = drafts[-1] if len(drafts) < 3 else torch.cat(drafts[1:], dim=1)
            sampling = self._sampling_of(before, chain_positions[i, :batch], rows.state_index)
            token = sample(logits, *sampling, self.draft_ids, None).token
            drafts.append(token[:, None])
        return torch.cat(drafts, dim=1)

    def _cursors(self) -> Cursors:
        return Cursors(self.slots.base, self.slots.pos, self.slots.last_token)

    def _keep_pairs(
        self,
        state_index: torch.Tensor,
        window: Window,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
        accepted: Accepted,
    ) -> torch.Tensor:
        """Keep the pairs (token, hidden before it) of a round of one row a request for `catch_up`; the slots
        have no drafts then [B, 0]."""
        slots, index = self.slots, state_index.to(torch.int64)
        place = (index, (window.pos + 1) % slots.kept_ids.shape[1])
        slots.kept_ids[place] = tokens
        slots.kept_hidden[place] = hidden
        # Padding gains no token.
        slots.num_kept[index] = slots.num_kept[index] + accepted.packed[:, 0]
        return self._keep_drafts(state_index, tokens.new_empty((state_index.shape[0], 0)))

    def _keep_drafts(self, state_index: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
        """Store drafts [B, S] as the slots' first S, id 0 for what is missing and for padding; returns them.

        A round of a larger depth then verifies drafts that the host knows too.
        """
        is_live = state_index > 0
        missing = drafts.new_zeros((drafts.shape[0], self.slots.drafts.shape[1] - drafts.shape[1]))
        row = torch.cat((drafts, missing), dim=1)
        self.slots.drafts[state_index.to(torch.int64)] = torch.where(is_live[:, None], row, 0)
        return drafts

    def _decode_rows(self, state_index: torch.Tensor, window: Window) -> DecodeRows:
        return DecodeRows(
            rotary_positions=window.positions,
            causal_positions=window.positions,
            slot_mapping=window.kv_slots,
            block_table=window.block_table,
            state_index=state_index,
            start=window.pos,
            base=window.base,
        )

    def _rows(
        self,
        state_index: torch.Tensor,
        index: torch.Tensor,
        start: torch.Tensor,
        rows_per_request: int,
        base: torch.Tensor,
    ) -> DecodeRows:
        """Rows at positions start .. start + rows_per_request - 1 of each request.

        Near max_model_len positions are clamped and writes dropped, as are writes through block-table entries
        that are not reserved.
        """
        block_table = self.slots.block_table[index]
        place = (self.max_model_len, block_table, self.kv_cache.block_size)
        positions, slot_mapping = place_rows(start, rows_per_request, *place)
        positions = positions.flatten()
        places = (positions, positions, slot_mapping.flatten(), block_table)
        return DecodeRows(*places, state_index, start, base=base)
