"""A token's whole life on the device. Read this first.

Notation: S = mtp_step drafted tokens, W = S + 1 rows a request is verified on, B requests of a bucket.
`pos` of a request is the absolute position of its last token, which is emitted but not yet processed;
`base` is the position up to which its stored GDN state is folded. Rows are request-major: row b * W + k.

The one invariant: length, KV, conv inputs, GDN state and emitted ids all advance by the same num_accepted +
1. Nothing here depends on a value on the host, so that `torch.compile(fullgraph=True)` takes each step
whole.
"""

from __future__ import annotations

import torch
from torch import nn

from compiled_mtp.batch import SlotState
from compiled_mtp.cache.kv_cache import KVCache
from compiled_mtp.cache.state_cache import StateCache
from compiled_mtp.models.layers import Rows
from compiled_mtp.models.mtp import DraftModel
from compiled_mtp.models.qwen3_5 import TargetModel
from compiled_mtp.ops.linear import linear
from compiled_mtp.ops.sample import sample


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
        self.synthetic_acceptance = synthetic_acceptance
        # A cut head costs acceptance where the target draws another id, and never a token.
        self.register_buffer("draft_ids", draft_ids)
        self.register_buffer("draft_head", None if draft_ids is None else target.head_weight[draft_ids])

    def decode(self, state_index: torch.Tensor) -> torch.Tensor:
        """Verify S drafts of each request and draft S new ones.

        state_index [B] int32, 0 for padding. Returns [B, 1 + W] int64: num_new, then the W sampled tokens
        of which the first num_new are the request's. num_new is 0 for padding. Mutates the caches and the
        slots' cursors, last tokens and drafts.
        """
        slots, query_len = self.slots, self.mtp_step + 1
        index = state_index.to(torch.int64)
        is_live = state_index > 0
        pos = slots.pos[index]
        window = torch.cat((slots.last_token[index][:, None], slots.drafts[index][:, : self.mtp_step]), dim=1)
        tokens = window.flatten()

        # 1. One forward of the target over [last token, d_1 .. d_S] at positions p .. p + S.
        rows = self._rows(state_index, index, pos, query_len, slots.base[index])
        hidden = self.target(tokens, rows, self.kv_cache, self.state_cache, self.cos_sin)
        # 2. y_k is the request's token at position p + k + 1, given that the k drafts before it are right.
        sampled = self._sample(self.target.logits(hidden), tokens, _span(pos + 1, query_len), state_index)
        sampled = sampled.view(-1, query_len)
        # 3. Keep the leading drafts that agree; y_{num_accepted} is the bonus token.
        agrees = window[:, 1:] == sampled[:, :-1]
        if self.synthetic_acceptance is not None:
            agrees = _synthetic(pos, self.mtp_step, self.synthetic_acceptance)
        num_accepted = agrees.to(torch.int64).cumprod(dim=1).sum(dim=1)
        num_new = torch.where(is_live, num_accepted + 1, 0)
        bonus = sampled.gather(1, num_accepted[:, None])[:, 0]
        # 4. Commit. The GDN layers have just folded their state up to the old `pos`.
        new_pos = pos + num_new
        slots.base[index] = pos
        slots.pos[index] = new_pos
        slots.last_token[index] = torch.where(is_live, bonus, 0)
        # 5. and 6. Make the draft's KV true for every row, then draft from the accepted one.
        if self.draft is not None:
            rows = self._rows(state_index, index, pos + 1, query_len, pos)
            drafted = self._draft_forward(sampled.flatten(), hidden, rows)
            drafted = drafted.view(-1, query_len, drafted.shape[-1])
            last = num_accepted[:, None, None].expand(-1, 1, drafted.shape[-1])
            drafts = self._draft_chain(drafted.gather(1, last)[:, 0], state_index, index, new_pos)
            slots.drafts[index] = torch.where(is_live[:, None], drafts, 0)
        return torch.cat((num_new[:, None], sampled), dim=1)

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
        token = self._sample(logits, slots.last_token[index], pos, state_index)
        slots.last_token[index] = token
        if self.draft is not None:
            rows = self._rows(state_index, index, pos, 1, pos)
            drafted = self._draft_forward(token, hidden, rows)
            slots.drafts[index] = self._draft_chain(drafted, state_index, index, pos)
        return token

    def _draft_forward(self, token_ids: torch.Tensor, hidden: torch.Tensor, rows: Rows) -> torch.Tensor:
        assert self.draft is not None
        assert self.kv_cache.draft is not None
        table = self.target.embed.weight
        return self.draft(table, token_ids, hidden, rows, self.kv_cache.draft, self.cos_sin)

    def _draft_chain(
        self, hidden: torch.Tensor, state_index: torch.Tensor, index: torch.Tensor, pos: torch.Tensor
    ) -> torch.Tensor:
        """Draft d_1 .. d_S [B, S] from the draft's hidden [B, H] of the pair at slot `pos` [B].

        Writes the pairs (d_i, previous draft hidden) at slots pos + i for i < S, past the accepted tail,
        where the next extend overwrites them. The draft samples with the request's own noise: it then
        agrees with the target far more often than its argmax would (Daliri, Musco, Suresh, arXiv
        2408.07978).
        """
        drafts = []
        token = self.slots.last_token[index]
        for i in range(1, self.mtp_step + 1):
            head = self.target.head_weight if self.draft_head is None else self.draft_head
            logits = linear(hidden, head, None, True, False)
            token = self._sample(logits, token, pos + i, state_index)
            if self.draft_ids is not None:
                token = self.draft_ids[token]
            drafts.append(token)
            if i < self.mtp_step:
                rows = self._rows(state_index, index, pos + i, 1, pos)
                hidden = self._draft_forward(token, hidden, rows)
        return torch.stack(drafts, dim=1)

    def _sample(
        self,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        state_index: torch.Tensor,
    ) -> torch.Tensor:
        slots = self.slots
        return sample(
            logits,
            tokens,
            positions,
            state_index,
            slots.temperature,
            slots.top_p,
            slots.min_p,
            slots.repetition_penalty,
            slots.presence_penalty,
            slots.frequency_penalty,
            slots.top_k,
            slots.seed,
            slots.output_counts,
            slots.prompt_seen,
            slots.bias,
            slots.min_position,
            slots.stop_ids,
            min(self.num_valid_ids, logits.shape[1]),
        )[0]

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
        block_size = self.kv_cache.block_size
        offsets = torch.arange(rows_per_request, device=start.device)
        true_positions = start[:, None] + offsets
        # The last real row: padding rows of a chunk repeat its position, so that they read written keys
        # alone.
        end = self.max_model_len if length is None else (start + length)[:, None]
        positions = true_positions.clamp(max=end - 1)
        block_table = self.slots.block_table[index]
        block = block_table.gather(1, positions // block_size).to(torch.int64)
        is_written = (block > 0) & (true_positions < end)
        slot_mapping = torch.where(is_written, block * block_size + positions % block_size, -1)
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


def _span(start: torch.Tensor, count: int) -> torch.Tensor:
    """[B] int64 to [B * count]: start, start + 1, ... of each request."""
    return (start[:, None] + torch.arange(count, device=start.device)).flatten()


def _synthetic(pos: torch.Tensor, mtp_step: int, rate: float) -> torch.Tensor:
    """Benchmarks only: [B, S] bool, true at about `rate`, from a hash of the draft's position."""
    positions = pos[:, None] + torch.arange(1, mtp_step + 1, device=pos.device)
    # Knuth's multiplicative hash; its upper bits are the even ones.
    hashed = (positions * 2654435761) % 2**32 // 2**16
    return hashed < round(rate * 2**16)
