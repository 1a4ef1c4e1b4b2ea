"""A linear of integer codes, with a scale and a zero point per group of columns of a row."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch

from compiled_mtp.models.formats.unpack import groups_of, scaled
from compiled_mtp.models.formats.weight import PackedWeight

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


class IntegerWeight(PackedWeight):
    """W = (q - z) * s.

    bits: of a code. group: columns that share s and z. scales: the last part of the scales' tensor's name.
    """

    bits: int
    group: int
    scales: ClassVar[str]

    @property
    def scale_dtype(self) -> torch.dtype:
        """The dtype in which the scales are stored."""
        return _DTYPES[self.parts[self.scales].dtype]

    @abstractmethod
    def codes(
        self, rows: slice, columns: slice, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor | int, torch.Tensor]:
        """The codes [n, k] of these rows and columns, and the zero points and scales [n, groups] of their
        groups.

        If all zero points are equal, they may be one number.
        """

    def decode(self, rows: slice, columns: slice, device: torch.device) -> torch.Tensor:
        """The float32 values of these rows and columns."""
        return scaled(*self.codes(rows, columns, device), groups_of(columns, self.group, device))
