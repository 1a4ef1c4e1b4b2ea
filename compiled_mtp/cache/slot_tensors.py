"""The one list of per-slot tensors: what an admission initialises, and what a copy moves with a request."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch


class SlotRow(NamedTuple):
    """One slot's part of a per-slot tensor: the row's shape and dtype, and `initial` as in `SlotTensor`."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    initial: float | None

    @property
    def num_bytes(self) -> int:
        """Bytes of a row."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class SlotTensor:
    """`tensor` [slots, ...]; `initial` is what every element of a row becomes at admission.

    initial None: the row stays as it is, because it is written before it is read, or because the admission
    brings it as a sampling parameter. is_in_snapshot: a prompt's next chunk reads the row, so that a state
    snapshot holds it.
    """

    name: str
    tensor: torch.Tensor
    initial: float | None = None
    is_in_snapshot: bool = False


class SlotTensors:
    """Per-slot tensors by name, in the order of their registration. All have the same number of slots."""

    def __init__(self, tensors: Iterable[SlotTensor] = ()) -> None:
        self._by_name: dict[str, SlotTensor] = {}
        for tensor in tensors:
            self.register(tensor)

    def register(self, entry: SlotTensor) -> None:
        """Add a tensor. Raises ValueError for a name that is taken and for another number of slots."""
        if entry.name in self._by_name:
            raise ValueError(f"name must be unused, got {entry.name!r}; choose another")
        for other in self:
            if other.tensor.shape[0] != entry.tensor.shape[0]:
                raise ValueError(
                    f"{entry.name} must have {other.tensor.shape[0]} slots, got {entry.tensor.shape[0]}; "
                    "make a row for each request and for the spare slots"
                )
            break
        self._by_name[entry.name] = entry

    def __iter__(self) -> Iterator[SlotTensor]:
        return iter(self._by_name.values())

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._by_name[name].tensor
