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

    def make(self, head: torch.Tensor, take_rows: Callable[[torch.Tensor], torch.Tensor]) -> DraftHead:
        """Return the draft head, copied from the target's head [V, H].

        take_rows(ids [n]) gives rows of the whole head, of which a rank has only some in `head`.
        """
        ids = None
        if self.ids is not None:
            ids = torch.tensor(self.ids, dtype=torch.int64, device=head.device)
        weight = head if ids is None else take_rows(ids)
        if self.is_fp8:
            return DraftHead(*quantize_weight(weight), ids)
        return DraftHead() if ids is None else DraftHead(weight, None, ids)

    def num_bytes(self, head: torch.Tensor) -> int:
        """Bytes of the device that the result of `make` takes."""
        rows, width = self.num_ids or len(head), head.shape[1]
        if not self.is_fp8:
            return rows * width * head.itemsize if self.ids is not None else 0
        blocks = scale_shape((rows, width))
        return rows * width + blocks[0] * blocks[1] * torch.float32.itemsize
