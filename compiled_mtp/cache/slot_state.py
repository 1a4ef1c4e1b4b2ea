"""What a step reads of a request on the device, row by row: cursors, drafts, block table, parameters."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from compiled_mtp.cache.slot_tensors import SlotTensor

# What a new request starts with; its parameters come with its admission, and the other rows are written
# before anything reads them.
_INITIAL = {"base": 0, "pos": 0, "last_token": 0, "drafts": 0}


class SlotState(nn.Module):
    """Everything the next step needs of a request, indexed by slot (row 0 is the padding row, all zeros for
    ever).

    base, pos, last_token, seed [slots] int64; drafts [slots, max(mtp_step, 1)] int64; block_table [slots,
    blocks] int32 (-1: not reserved); last_hidden [slots, hidden]: the target's hidden before the next
    prefill chunk; sampling parameters [slots]. Penalty counts and bias are [0, vocab_size], and min_position
    and stop_ids keep their first values: switched off in this version.
    """

    base: torch.Tensor
    pos: torch.Tensor
    last_token: torch.Tensor
    drafts: torch.Tensor
    block_table: torch.Tensor
    last_hidden: torch.Tensor
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

    def __init__(
        self,
        slots: int,
        mtp_step: int,
        max_blocks: int,
        hidden_size: int,
        vocab_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()

        def buffer(name: str, shape: tuple[int, ...], kind: torch.dtype, value: float = 0) -> None:
            self.register_buffer(name, torch.full(shape, value, dtype=kind, device=device))

        for name in ("base", "pos", "last_token", "seed", "min_position"):
            buffer(name, (slots,), torch.int64)
        buffer("drafts", (slots, max(mtp_step, 1)), torch.int64)
        buffer("block_table", (slots, max_blocks), torch.int32, -1)
        buffer("last_hidden", (slots, hidden_size), dtype)
        buffer("top_k", (slots,), torch.int32)
        for name in ("temperature", "min_p", "presence_penalty", "frequency_penalty"):
            buffer(name, (slots,), torch.float32)
        for name in ("top_p", "repetition_penalty"):
            buffer(name, (slots,), torch.float32, 1.0)
        buffer("output_counts", (0, vocab_size), torch.int32)
        buffer("prompt_seen", (0, vocab_size), torch.bool)
        buffer("bias", (0, vocab_size), torch.float32)
        buffer("stop_ids", (slots, 1), torch.int64, -1)

    def slot_tensors(self) -> Iterator[SlotTensor]:
        """What is admitted and moved with a request: every row but the block table's, which plans write."""
        slots = self.pos.shape[0]
        for name, tensor in self.named_buffers():
            if name != "block_table" and tensor.shape[0] == slots:
                yield SlotTensor(name, tensor, _INITIAL.get(name))

    def clear_padding_row(self) -> None:
        """Zero what warming up has left in row 0, which every padding request reads."""
        for name in ("base", "pos", "last_token", "drafts", "last_hidden"):
            getattr(self, name)[0] = 0
