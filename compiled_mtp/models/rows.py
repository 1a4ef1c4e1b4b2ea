"""Where the rows of a forward lie: what every layer is told beside the activations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch


@dataclass(frozen=True)
class Rows:
    """M rows of B requests; a forward takes one of the two kinds below.

    rotary_positions [M] int64: where the rotary embedding puts a row. causal_positions [M] int64: the last
    key that a row sees. In text the two are one tensor; the tokens of an image share rotary positions.
    slot_mapping [M] int64: KV slot (block id * block_size + offset), -1 for no write.
    block_table [B, max_blocks] int32, state_index [B] int32.
    start [B] int64: absolute position of a request's first row.
    """

    rotary_positions: torch.Tensor
    causal_positions: torch.Tensor
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    state_index: torch.Tensor
    start: torch.Tensor

    def moved(self, positions: torch.Tensor, slot_mapping: torch.Tensor) -> Self:
        """Rows of the same requests at other positions of their text."""
        return replace(
            self, rotary_positions=positions, causal_positions=positions, slot_mapping=slot_mapping
        )


@dataclass(frozen=True)
class DecodeRows(Rows):
    """Rows of a verify round or of a draft, M // B a request, request-major. base [B] int64: position up to
    which the stored GDN state is folded."""

    base: torch.Tensor


@dataclass(frozen=True)
class PrefillRows(Rows):
    """Rows of pieces of prompts, side by side: request b has the length[b] rows from first_row[b] on.

    All [B] int64; first_row holds multiples of PROMPT_CHUNK_MULTIPLE and never falls, and what has no rows
    comes last. Rows of nobody lie in between and behind. The GDN state after the first mark[b] rows is kept
    in the last slot; 0 for no such place.
    """

    length: torch.Tensor
    first_row: torch.Tensor
    snapshot_offset: torch.Tensor


def place_prompt_chunks(
    num_rows: int, rows: tuple[torch.Tensor, ...], block_table: torch.Tensor, block_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where the rows of pieces lie, given start, length and first_row, and their rows of the block table.

    Returns, each [num_rows] int64, the piece of every row, how many of its rows come before, the row's
    position, and its KV slot. Rows of nobody count to the piece before them, at its last position, and have
    slot -1, as have those whose block is not reserved (-1) or the padding's (0).
    """
    start, length, first_row = rows
    row = torch.arange(num_rows, device=start.device)
    prompt_chunk = (first_row <= row[:, None]).to(torch.int64).sum(dim=1) - 1
    before = row - first_row[prompt_chunk]
    positions = start[prompt_chunk] + torch.minimum(before, (length[prompt_chunk] - 1).clamp(min=0))
    blocks = block_table[prompt_chunk, positions // block_size].to(torch.int64)
    is_written = (before < length[prompt_chunk]) & (blocks > 0)
    slots = torch.where(is_written, blocks * block_size + positions % block_size, -1)
    return prompt_chunk, before, positions, slots
