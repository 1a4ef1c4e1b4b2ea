"""The rows of a forward: their positions, KV entries and states, which every layer gets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch


@dataclass(frozen=True)
class Rows:
    """M rows of B requests; a forward takes one of the two kinds below.

    rotary_positions [M] or [3, M] int64: the position of a row in the rotary embedding, on all axes or on
    each: time, row and column. causal_positions [M] int64: the last key that a row reads. In a prompt without
    images all are equal; the tokens of an image have other rotary positions, and so has the text after it.
    slot_mapping [M] int64: the kv_index of a row (block id * block_size + offset), -1 for no write.
    block_table [B, max_blocks] int32, state_index [B] int32.
    start [B] int64: absolute position of a request's first row.
    """

    rotary_positions: torch.Tensor
    causal_positions: torch.Tensor
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    state_index: torch.Tensor
    start: torch.Tensor

    def moved(
        self, rotary_positions: torch.Tensor, causal_positions: torch.Tensor, slot_mapping: torch.Tensor
    ) -> Self:
        """The same rows at other positions of their requests."""
        return replace(
            self,
            rotary_positions=rotary_positions,
            causal_positions=causal_positions,
            slot_mapping=slot_mapping,
        )


@dataclass(frozen=True)
class DecodeRows(Rows):
    """Rows of a verify round or of a draft: M // B rows per request, request-major.

    base [B] int64: the position up to which the stored GDN state is folded.
    """

    base: torch.Tensor


@dataclass(frozen=True)
class PrefillRows(Rows):
    """Rows of prompt chunks, one after another: chunk b has length[b] rows from row first_row[b] on.

    length, first_row, snapshot_offset: [B] int64. first_row holds multiples of PROMPT_CHUNK_MULTIPLE in
    ascending order; chunks without rows come last. Unused rows may follow every chunk. The GDN state after
    the first snapshot_offset[b] rows is written to the last slot, with 0 none.
    """

    length: torch.Tensor
    first_row: torch.Tensor
    snapshot_offset: torch.Tensor


def place_prompt_chunks(
    num_rows: int, rows: tuple[torch.Tensor, ...], block_table: torch.Tensor, block_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return every row's chunk, its index in that, its position and its kv_index, each [num_rows] int64.

    rows: (start, length, first_row) of the chunks; block_table: theirs. An unused row belongs to the chunk
    before it, at that chunk's last position, and has kv_index -1. So have rows whose block is not reserved
    (-1) or is the padding's (0).
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
