"""A head of the drafts' own, with fewer rows than the target's or with rows in FP8.

It changes no token. It lowers acceptance where the target draws an id that is missing in it, or whose logit
is changed by rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from compiled_mtp.ops.fp8 import quantize_weight, scale_shape


class DraftHead(NamedTuple):
    """The tensors of a draft head.

    weight: [n, H] in the target's dtype, or in FP8 with scale [ceil(n/128), ceil(H/128)]; None for the
    target's head. ids: [n] int64, those of the rows; None for 0, 1, ...
    """

    weight: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    ids: torch.Tensor | None = None


@dataclass(frozen=True)
class DraftHeadPlan:
    """The rows of the target's head that the draft head has, ascending, None for all, and whether in FP8."""

    ids: tuple[int, ...] | None
    is_fp8: bool

    @property
    def num_ids(self) -> int | None:
        """The number of rows, None for all."""
        return None if self.ids is None else len(self.ids)

    def make(
        self, take_rows: Callable[[torch.Tensor | None], torch.Tensor], device: torch.device
    ) -> DraftHead:
        """Return the draft head on `device`, copied from the target's head [V, H].

        take_rows(ids [n]) gives rows of the whole head, take_rows(None) all rows, or those that a rank has.
        """
        ids = None
        if self.ids is not None:
            ids = torch.tensor(self.ids, dtype=torch.int64, device=device)
        if self.is_fp8:
            return DraftHead(*quantize_weight(take_rows(ids)), ids)
        return DraftHead() if ids is None else DraftHead(take_rows(ids), None, ids)

    def num_bytes(self, rows: int, width: int, dtype: torch.dtype) -> int:
        """Bytes of the device that the result of `make` takes for a head [rows, width] in `dtype`."""
        rows = self.num_ids or rows
        if not self.is_fp8:
            return rows * width * dtype.itemsize if self.ids is not None else 0
        blocks = scale_shape((rows, width))
        return rows * width + blocks[0] * blocks[1] * torch.float32.itemsize
