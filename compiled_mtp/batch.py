"""What a step reads on the device: per-request rows that live across steps, and how a plan's changes reach
them."""

from __future__ import annotations

import torch
from torch import nn

from compiled_mtp.plan import Admit, Release, StepPlan


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

    def install(self, plan: StepPlan) -> None:
        """Install what changed on the host: released rows, admitted requests, block-table growth.

        Called before a launch, outside every graph. A plan that changes nothing copies nothing.
        """
        released = [move.slot for move in plan.moves if isinstance(move, Release)]
        admitted = tuple(move for move in plan.moves if isinstance(move, Admit))
        if released:
            self.block_table[self._indices(released)] = -1
        if admitted:
            self._admit(admitted)
        if plan.block_updates:
            slots, columns, blocks = zip(*plan.block_updates, strict=True)
            values = self._indices(blocks).to(torch.int32)
            self.block_table[self._indices(slots), self._indices(columns)] = values

    def clear_padding_row(self) -> None:
        """Zero what warming up has left in row 0, which every padding request reads."""
        for name in ("base", "pos", "last_token", "drafts", "last_hidden"):
            getattr(self, name)[0] = 0

    def _admit(self, admitted: tuple[Admit, ...]) -> None:
        rows = self._indices([init.slot for init in admitted])
        for name in ("base", "pos", "last_token", "drafts"):
            getattr(self, name)[rows] = 0
        for name in ("seed", "temperature", "top_k", "top_p", "min_p"):
            buffer = getattr(self, name)
            values = torch.tensor([getattr(init, name) for init in admitted], dtype=buffer.dtype)
            buffer[rows] = self._to_device(values)

    def _indices(self, values: tuple[int, ...] | list[int]) -> torch.Tensor:
        return self._to_device(torch.tensor(values, dtype=torch.int64))

    def _to_device(self, host: torch.Tensor) -> torch.Tensor:
        if self.pos.is_cuda:
            # The caching host allocator keeps a pinned block until the copy that reads it has run.
            return host.pin_memory().to(self.pos.device, non_blocking=True)
        return host
