"""What a step reads of each request on the device: cursors, drafts, block table, sampling parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from compiled_mtp.cache.slot_sampling import MAX_BAD_WORDS, MAX_STOP_IDS
from compiled_mtp.cache.slot_tensors import SlotRow, SlotTensor
from compiled_mtp.ops.features import RECENT_IDS

# The rows' values at admission; drafters name the values of their own rows. Sampling parameters come with the
# admission itself; the other rows are written before they are read.
_INITIAL = {
    "base": 0,
    "pos": 0,
    "last_token": 0,
    "drafts": 0,
    "rotary_delta": 0,
    "forced_ids": -1,
}
# Rows of drafters that a step asks for: None without the drafter.
_OPTIONAL = ("token_ids", "matched", "threshold", "chain_kept")


def sampling_bytes(vocab_size: int, num_forced: int = 0) -> int:
    """Return the bytes of a slot's larger sampling tables."""
    words = MAX_STOP_IDS + MAX_BAD_WORDS * RECENT_IDS + RECENT_IDS
    by_id = torch.int32.itemsize + torch.bool.itemsize + torch.float32.itemsize
    int32s = MAX_BAD_WORDS + num_forced
    return vocab_size * by_id + words * torch.int64.itemsize + int32s * torch.int32.itemsize


class SlotState(nn.Module):
    """Everything the next step needs of a request, indexed by slot; row 0 is the padding row and stays zero.

    base, pos, last_token, seed [slots] int64; drafts [slots, max(max_drafts, 1)] int64; block_table [slots,
    blocks] int32 (-1: not reserved); last_hidden [slots, hidden]: the target's hidden before the next prefill
    chunk. The sampling tables are the fields of `SamplingTables`, written by `write_sampling`. A request
    whose features need them counts its emitted tokens in output_counts [slots, vocab_size] and keeps the last
    ones in recent_ids [slots, RECENT_IDS]. rotary_delta [slots] int64: as in `Admit`. forced_ids [slots,
    num_forced] int32, None for num_forced 0: the ids that are committed in the place of samples, by position;
    -1 for none. `rows`: what the drafters keep (rounds.drafters); of the other names below, those of lookup
    are None and those of the chain are missing.
    """

    base: torch.Tensor
    pos: torch.Tensor
    rotary_delta: torch.Tensor
    last_token: torch.Tensor
    drafts: torch.Tensor
    block_table: torch.Tensor
    last_hidden: torch.Tensor
    num_deferred: torch.Tensor
    deferred_ids: torch.Tensor
    deferred_hidden: torch.Tensor
    seed: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    repetition_penalty: torch.Tensor
    presence_penalty: torch.Tensor
    frequency_penalty: torch.Tensor
    output_counts: torch.Tensor
    prompt_seen: torch.Tensor
    bias: torch.Tensor
    min_position: torch.Tensor
    stop_ids: torch.Tensor
    features: torch.Tensor
    bad_words: torch.Tensor
    bad_word_lengths: torch.Tensor
    recent_ids: torch.Tensor
    forced_ids: torch.Tensor | None
    token_ids: torch.Tensor | None
    matched: torch.Tensor | None
    threshold: torch.Tensor | None
    chain_kept: torch.Tensor | None

    def __init__(
        self,
        slots: int,
        max_drafts: int,
        max_blocks: int,
        hidden_size: int,
        vocab_size: int,
        dtype: torch.dtype,
        device: torch.device,
        num_forced: int = 0,
        rows: Sequence[SlotRow] = (),
    ) -> None:
        super().__init__()
        self._initial = _INITIAL | {row.name: row.initial for row in rows if row.initial is not None}

        def buffer(name: str, shape: tuple[int, ...], kind: torch.dtype, value: float = 0) -> None:
            self.register_buffer(name, torch.full(shape, value, dtype=kind, device=device))

        for name in ("base", "pos", "last_token", "seed", "min_position", "rotary_delta"):
            buffer(name, (slots,), torch.int64)
        buffer("drafts", (slots, max(max_drafts, 1)), torch.int64)
        buffer("block_table", (slots, max_blocks), torch.int32, -1)
        buffer("last_hidden", (slots, hidden_size), dtype)
        buffer("top_k", (slots,), torch.int32)
        for name in ("temperature", "min_p", "presence_penalty", "frequency_penalty"):
            buffer(name, (slots,), torch.float32)
        for name in ("top_p", "repetition_penalty"):
            buffer(name, (slots,), torch.float32, 1.0)
        buffer("output_counts", (slots, vocab_size), torch.int32)
        buffer("prompt_seen", (slots, vocab_size), torch.bool)
        buffer("bias", (slots, vocab_size), torch.float32)
        buffer("features", (slots,), torch.int32)
        buffer("stop_ids", (slots, MAX_STOP_IDS), torch.int64, -1)
        buffer("bad_words", (slots, MAX_BAD_WORDS, RECENT_IDS), torch.int64, -1)
        buffer("bad_word_lengths", (slots, MAX_BAD_WORDS), torch.int32)
        buffer("recent_ids", (slots, RECENT_IDS), torch.int64, -1)
        if num_forced:
            buffer("forced_ids", (slots, num_forced), torch.int32, -1)
        else:
            self.register_buffer("forced_ids", None)
        for name in _OPTIONAL:
            self.register_buffer(name, None)
        for row in rows:
            buffer(row.name, (slots, *row.shape), row.dtype, row.initial or 0)

    def slot_tensors(self) -> Iterator[SlotTensor]:
        """Yield what is admitted and moved with a request: all tensors but the block table, which plans
        write.
        """
        slots = self.pos.shape[0]
        for name, tensor in self.named_buffers():
            if name != "block_table" and tensor.shape[0] == slots:
                yield SlotTensor(name, tensor, self._initial.get(name), is_in_snapshot=name == "last_hidden")

    def clear_padding_row(self) -> None:
        """Zero row 0, which every padding request reads; warm-up writes to it."""
        for name in ("base", "pos", "last_token", "drafts", "last_hidden"):
            getattr(self, name)[0] = 0
