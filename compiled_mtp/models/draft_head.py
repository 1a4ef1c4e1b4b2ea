"""The head that drafts read, where it is not the target's: fewer rows, or rows in FP8.

It costs acceptance where the target draws an id that is missing or that rounding has moved, and never a
token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from compiled_mtp.ops.fp8 import quantize_weight, scale_shape


class DraftHead(NamedTuple):
    """weight [n, H] of the target's dtype, or FP8 with scale [ceil(n/128), ceil(H/128)]; None: the target's.

    ids [n] int64: those of the rows; None for 0, 1, ...
    """

    weight: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    ids: torch.Tensor | None = None


@dataclass(frozen=True)
class DraftHeadPlan:
    """Which rows of the target's head drafts read, ascending, None for all, and whether in FP8."""

    ids: tuple[int, ...] | None
    is_fp8: bool

    @property
    def num_ids(self) -> int | None:
        """How many rows, None for all."""
        return None if self.ids is None else len(self.ids)

    def make(self, head: torch.Tensor, take_rows: Callable[[torch.Tensor], torch.Tensor]) -> DraftHead:
        """Copy what is needed of the target's head [V, H], of which take_rows gives the rows of ids [n]."""
        ids = None
        if self.ids is not None:
            ids = torch.tensor(self.ids, dtype=torch.int64, device=head.device)
        weight = head if ids is None else take_rows(ids)
        if self.is_fp8:
            return DraftHead(*quantize_weight(weight), ids)
        return DraftHead() if ids is None else DraftHead(weight, None, ids)

    def num_bytes(self, head: torch.Tensor) -> int:
        """What `make` takes of the device's memory."""
        rows, width = self.num_ids or len(head), head.shape[1]
        if not self.is_fp8:
            return rows * width * head.itemsize if self.ids is not None else 0
        blocks = scale_shape((rows, width))
        return rows * width + blocks[0] * blocks[1] * torch.float32.itemsize
