"""A token's whole life on the device. Read this first.

Notation: S = mtp_step drafted tokens, W = S + 1 rows a request is verified on, B requests of a bucket.
`pos` of a request is the absolute position of its last token, which is emitted but not yet processed;
`base` is the position up to which its stored GDN state is folded. Rows are request-major: row b * W + k.

The one invariant: length, KV, conv inputs, GDN state and emitted ids all advance by the same num_accepted +
1. Nothing here depends on a value on the host, so that `torch.compile(fullgraph=True)` takes each step
whole.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from compiled_mtp.batch import SlotState
from compiled_mtp.cache.kv_cache import KVCache
from compiled_mtp.cache.state_cache import StateCache
from compiled_mtp.models.layers import Rows
from compiled_mtp.models.mtp import DraftModel
from compiled_mtp.models.qwen3_5 import TargetModel
from compiled_mtp.ops.linear import linear
from compiled_mtp.ops.sample import Sampled, SamplingTables, sample
from compiled_mtp.ops.window import Cursors, accept_window, place_chain, place_rows, read_window


class Step(nn.Module):
    """Models, caches and slot rows, bound together so that the compiler sees their buffers at static
    addresses."""

    cos_sin: torch.Tensor
    draft_head: torch.Tensor | None
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
        draft_ids: torch.Tensor | None = None,
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
        self.register_buffer("cos_sin", cos_sin)
        self.mtp_step = mtp_step
        self.num_valid_ids = num_valid_ids
        self.max_model_len = max_model_len
        # Benchmarks only: drafts are kept at that rate, whatever they are.
        self.hash_limit = -1 if synthetic_acceptance is None else round(synthetic_acceptance * 2**16)
        # A cut head costs acceptance where the target draws another id, and never a token.
        self.register_buffer("draft_ids", draft_ids)
        self.register_buffer("draft_head", None if draft_ids is None else target.head_weight[draft_ids])

    def decode(self, state_index: torch.Tensor) -> torch.Tensor:
        """Verify S drafts of each request and draft S new ones.

        state_index [B] int32, 0 for padding. Returns [B, 2 + W] int64: num_new, num_finite, then the
        W sampled tokens of which the first num_new are the request's (`Accepted`). Both are 0 for padding.
        Mutates the caches and the slots' cursors, last tokens and drafts.
        """
        slots, mtp_step = self.slots, self.mtp_step
        place = (mtp_step, self.kv_cache.block_size, self.max_model_len)
        cursors = Cursors(slots.base, slots.pos, slots.last_token)
        window = read_window(state_index, cursors, slots.drafts, slots.block_table, *place)
        # 1. One forward of the target over [last token, d_1 .. d_S] at positions p .. p + S.
        rows = Rows(
            window.positions, window.kv_slots, window.block_table, state_index, window.pos, window.base,
            window.pos, is_prefill=False,
        )  # fmt: skip
        hidden = self.target(window.tokens, rows, self.kv_cache, self.state_cache, self.cos_sin)
        # 2. y_k is the request's token at position p + k + 1, given that the k drafts before it are right.
        logits = self.target.logits(hidden)
        sampled = self._sample(logits, window.tokens, window.sampled_positions, state_index)
        # 3. Keep the leading drafts that agree; y_{num_accepted} is the bonus token.
        # 4. Commit. The GDN layers have just folded their state up to the old `pos`.
        accepted = accept_window(
            window.tokens, sampled.token, sampled.is_finite, state_index, window.pos, window.block_table,
            cursors, *place, self.hash_limit,
        )  # fmt: skip
        # 5. and 6. Make the draft's KV true for every row, then draft from the accepted one.
        if self.draft is not None:
            rows = replace(rows, positions=accepted.positions, slot_mapping=accepted.kv_slots)
            drafted = self._draft_forward(sampled.token, hidden, rows, accepted.accepted_row)
            drafts = self._draft_chain(
                drafted, accepted.bonus, rows, accepted.chain_positions, accepted.chain_slots
            )
            index, is_live = state_index.to(torch.int64), state_index > 0
            slots.drafts[index] = torch.where(is_live[:, None], drafts, 0)
        return accepted.packed

    def prefill(
        self,
        token_ids: torch.Tensor,
        state_index: torch.Tensor,
        start: torch.Tensor,
        length: torch.Tensor,
    ) -> torch.Tensor:
        """Process one chunk of one prompt.

        token_ids [T] int64, of which the first `length` [1] int64 are real; start [1] int64 is a multiple of
        the chunk size; state_index [1] int32. Returns the target's hidden state of the last real row [1, H].
        Mutates the caches, and the slot's base, pos and last_hidden.
        """
        slots = self.slots
        index = state_index.to(torch.int64)
        rows = self._rows(state_index, index, start, token_ids.shape[0], start, length)
        hidden = self.target(token_ids, rows, self.kv_cache, self.state_cache, self.cos_sin)
        if self.draft is not None:
            # Slot j of the draft's KV is the pair (token j, hidden j - 1): the first hidden is the one that
            # the chunk before has left.
            carried = torch.where(start[:, None] > 0, slots.last_hidden[index], 0.0)
            self._draft_forward(token_ids, torch.cat((carried, hidden[:-1])), rows)
        last_hidden = hidden.index_select(0, length - 1)
        slots.last_hidden[index] = last_hidden
        slots.base[index] = start + length
        slots.pos[index] = start + length
        return last_hidden

    def first_token(self, state_index: torch.Tensor) -> torch.Tensor:
        """Sample y_0 after the last chunk of a prompt and draft from it: the first round is a real one.

        state_index [1] int32. Returns y_0 [1] int64. Mutates the slot's last token and drafts, and the
        draft's KV.
        """
        slots = self.slots
        index = state_index.to(torch.int64)
        hidden, pos = slots.last_hidden[index], slots.pos[index]
        logits = self.target.logits(hidden, is_prefill=True)
        token = self._sample(logits, slots.last_token[index], pos, state_index).token
        slots.last_token[index] = token
        if self.draft is not None:
            rows = self._rows(state_index, index, pos, 1, pos)
            drafted = self._draft_forward(token, hidden, rows)
            chain = place_chain(
                pos, self.mtp_step, self.max_model_len, rows.block_table, self.kv_cache.block_size
            )
            slots.drafts[index] = self._draft_chain(drafted, token, rows, *chain)
        return token

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
    ) -> torch.Tensor:
        """Draft d_1 .. d_S [B, S] from the draft's hidden [B, H] of the pair at slot `pos`, the last `token`
        [B].

        Writes the pairs (d_i, previous draft hidden) at slots pos + i for i < S, which chain_slots [S, >= B]
        names, past the accepted tail, where the next extend overwrites them. The draft samples with the
        request's own noise: it then agrees with the target far more often than its argmax would (Daliri,
        Musco, Suresh, arXiv 2408.07978).
        """
        drafts, batch = [], hidden.shape[0]
        head = self.target.head_weight if self.draft_head is None else self.draft_head
        for i in range(self.mtp_step):
            if i:
                # The pair of the draft before.
                chained = replace(
                    rows, positions=chain_positions[i - 1, :batch], slot_mapping=chain_slots[i - 1, :batch]
                )
                hidden = self._draft_forward(token, hidden, chained)
            logits = linear(hidden, head, None, True, False)
            # Drafts past max_model_len take the last position's noise: no request has room for them.
            token = self._sample(logits, token, chain_positions[i, :batch], rows.state_index).token
            if self.draft_ids is not None:
                token = self.draft_ids[token]
            drafts.append(token)
        return torch.stack(drafts, dim=1)

    def _sample(
        self,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        state_index: torch.Tensor,
    ) -> Sampled:
        tables = SamplingTables(*(getattr(self.slots, name) for name in SamplingTables._fields))
        num_valid_ids = min(self.num_valid_ids, logits.shape[1])
        return sample(logits, tokens, positions, state_index, tables, num_valid_ids)

    def _rows(
        self,
        state_index: torch.Tensor,
        index: torch.Tensor,
        start: torch.Tensor,
        rows_per_request: int,
        base: torch.Tensor,
        length: torch.Tensor | None = None,
    ) -> Rows:
        """Rows at positions start .. start + rows_per_request - 1 of each request; prefill when `length` is
        given.

        Near max_model_len positions are clamped and writes dropped, as are writes of padding rows and through
        block-table entries that are not reserved.
        """
        # The last real row: padding rows of a chunk repeat its position, so that they read written keys
        # alone.
        end = self.max_model_len if length is None else (start + length)[:, None]
        block_table = self.slots.block_table[index]
        positions, slot_mapping = place_rows(
            start, rows_per_request, end, block_table, self.kv_cache.block_size
        )
        return Rows(
            positions=positions.flatten(),
            slot_mapping=slot_mapping.flatten(),
            block_table=block_table,
            state_index=state_index,
            start=start,
            base=base,
            length=start if length is None else length,
            is_prefill=length is not None,
        )
