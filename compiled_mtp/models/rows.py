"""Where the rows of a forward lie: what every layer is told beside the activations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch


@dataclass(frozen=True)
class Rows:
    """M rows of B requests, M // B each, request-major; a forward takes one of the two kinds below.

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
    """Rows of a verify round or of a draft. base [B] int64: position up to which the stored GDN state is
    folded."""

    base: torch.Tensor


@dataclass(frozen=True)
class PrefillRows(Rows):
    """Rows of a prompt's chunk. length [B] int64: how many of a request's rows are real."""

    length: torch.Tensor
