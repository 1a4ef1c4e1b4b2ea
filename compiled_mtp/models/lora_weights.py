"""Weights with a LoRA adapter's change added: W + scale * B A, in float64, whenever a part of one is read.

A value has the same bits whatever part is read, so that ranks, which read parts, hold the weights of one
process: products have sizes that do not depend on the part.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import torch

from compiled_mtp.models.headers import Header
from compiled_mtp.models.stored_weight import Region

# Rows of B that are multiplied at a time, from absolute rows on.
_TILE = 256


class Change(Protocol):
    """What is added to a weight. name: of a tensor of the adapter. shape: of the weight."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def add_to(self, values: torch.Tensor, region: Region) -> None:
        """Add the change of a region to its values, float64 on any device, which are mutated."""
        ...


@dataclass(frozen=True)
class Pair:
    """The matrices A [r, K] and B [N, r] of one linear; scale * B A is added to its weight [N, K]."""

    a: Header
    b: Header
    scale: float

    @property
    def name(self) -> str:
        return self.b.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.b.shape[0], self.a.shape[1]

    def add_to(self, values: torch.Tensor, region: Region) -> None:
        rows, columns = region
        height, rank = self.b.shape
        a = _to(self.a.read((slice(0, rank), slice(0, self.a.shape[1]))), values)
        for start in range(rows.start // _TILE * _TILE, rows.stop, _TILE):
            end = min(start + _TILE, height)
            added = _to(self.b.read((slice(start, end), slice(0, rank))), values) @ a
            first, last = max(start, rows.start), min(end, rows.stop)
            part = added[first - start : last - start, columns] * self.scale
            values[first - rows.start : last - rows.start] += part


@dataclass(frozen=True)
class StackPair:
    """The matrices A [E * r, K] and B [N, r * E] of a stack of E experts [E, N, K].

    A has the r rows of expert 0, then the r rows of expert 1, and so on; B has column j of all experts, then
    column j + 1.
    """

    a: Header
    b: Header
    scale: float
    num_experts: int

    def added(self, expert: int, values: torch.Tensor) -> torch.Tensor:
        """The change [N, K] of one expert, in the dtype and on the device of `values`."""
        rank = self.b.shape[1] // self.num_experts
        rows = slice(expert * rank, (expert + 1) * rank)
        a = _to(self.a.read((rows, slice(0, self.a.shape[1]))), values)
        return _to(_read_whole(self.b)[:, expert :: self.num_experts], values) @ a * self.scale


@dataclass(frozen=True)
class StackChange:
    """The change of a stack [E, N, K] that a checkpoint stores as one tensor."""

    pair: StackPair

    @property
    def name(self) -> str:
        return self.pair.b.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.pair.num_experts, self.pair.b.shape[0], self.pair.a.shape[1]

    def add_to(self, values: torch.Tensor, region: Region) -> None:
        experts, rows, columns = region
        for index, expert in enumerate(range(experts.start, experts.stop)):
            values[index] += self.pair.added(expert, values)[rows, columns]


@dataclass(frozen=True)
class ExpertChange:
    """The change of `rows` rows of one expert, from row `first` of the stack on, stored as a matrix."""

    pair: StackPair
    expert: int
    first: int
    rows: int

    @property
    def name(self) -> str:
        return self.pair.b.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.rows, self.pair.a.shape[1]

    def add_to(self, values: torch.Tensor, region: Region) -> None:
        rows, columns = region
        own = slice(self.first + rows.start, self.first + rows.stop)
        values += self.pair.added(self.expert, values)[own, columns]


@dataclass(frozen=True)
class MergedWeight:
    """A stored weight with a change added; its values are float32, see `StoredWeight`."""

    base: Header
    change: Change

    @property
    def name(self) -> str:
        return self.base.name

    @property
    def file(self) -> Path:
        return self.base.file

    @property
    def dtype(self) -> str:
        return self.base.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    @property
    def num_bytes(self) -> int:
        return self.base.num_bytes

    def read(self, region: Region, device: torch.device | None = None) -> torch.Tensor:
        """The float32 values in `region`, on `device` or on the CPU."""
        values = self.base.read(region, device).to(device, torch.float64)
        self.change.add_to(values, region)
        return values.float()


def _to(part: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return part.to(values.device, values.dtype)


@lru_cache(maxsize=1)
def _read_whole(header: Header) -> torch.Tensor:
    """A whole matrix. All experts of a layer read the same one after another, each some of its columns."""
    return header.read_whole()
