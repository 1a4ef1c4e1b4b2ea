"""A linear of integer codes, with a scale and a zero point per group of columns of a row."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch

from compiled_mtp.errors import check
from compiled_mtp.models.formats.claims import Claims
from compiled_mtp.models.formats.unpack import covering, groups_of, scaled
from compiled_mtp.models.formats.weight import AGAIN, PackedWeight

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


class IntegerWeight(PackedWeight):
    """W = (q - z) * s.

    bits: of a code. group: columns that share s and z. scales: the last part of the scales' tensor's name.
    indices: that of an optional tensor with the group of each column. is_in_order: whether column k is in
    group k // group.
    """

    bits: int
    group: int
    scales: ClassVar[str]
    indices: ClassVar[str] = ""
    is_in_order: bool = True

    @property
    def scale_dtype(self) -> torch.dtype:
        """The dtype in which the scales are stored."""
        return _DTYPES[self.parts[self.scales].dtype]

    def find_order(self, columns: int, claims: Claims) -> None:
        """Set is_in_order.

        The indices of a reordered checkpoint alone are read here, because a mixture has thousands of them.
        Raises ValueError for another number of indices than columns.
        """
        if self.indices in self.parts:
            self.check_shape(self.indices, columns)
            self.is_in_order = not claims.is_reordered or self._has_order(self.whole(self.indices))

    def check_indices(self) -> None:
        """Raise ValueError for indices outside the groups, and for an order that config.json does not
        name."""
        if self.indices not in self.parts:
            return
        name, stored = self.parts[self.indices].name, self.whole(self.indices)
        if self.is_in_order:
            rule = f"put column k into group k // {self.group}"
            remedy = "if that is right, config.json must say so: desc_act, or compressed-tensors' actorder"
            check(self._has_order(stored), name, rule, "another order", remedy)
        outside = stored[(stored < 0) | (stored >= self._num_groups)].tolist()
        check(not outside, name, f"lie in 0 to {self._num_groups - 1}", outside[:1], AGAIN)

    def check_values(self) -> None:
        """Raise ValueError unless indices are right (`check_indices`) and scales are finite."""
        self.check_indices()
        self.check_finite(self.scales)

    def groups(self, columns: slice) -> slice:
        """The groups whose zero points and scales `codes` returns for these columns."""
        return covering(columns, self.group) if self.is_in_order else slice(0, self._num_groups)

    def _group_of(self, columns: slice, device: torch.device) -> torch.Tensor:
        """The place of each column's group among `groups`: int64 [columns]."""
        if self.is_in_order:
            return groups_of(columns, self.group, device)
        return self.part(self.indices, columns, device=device).long()

    def _has_order(self, stored: torch.Tensor) -> bool:
        """Whether indices put column k into group k // group."""
        return torch.equal(stored.long(), torch.arange(len(stored)) // self.group)

    @property
    def _num_groups(self) -> int:
        return -(-self.shape[1] // self.group)

    @abstractmethod
    def codes(
        self, rows: slice, columns: slice, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor | int, torch.Tensor]:
        """The codes [n, k] of these rows and columns, and the zero points and scales [n, groups] of the
        `groups` of these columns.

        If all zero points are equal, they may be one number.
        """

    def decode(self, rows: slice, columns: slice, device: torch.device) -> torch.Tensor:
        """The float32 values of these rows and columns."""
        return scaled(*self.codes(rows, columns, device), self._group_of(columns, device))
