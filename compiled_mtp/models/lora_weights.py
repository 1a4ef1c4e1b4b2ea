"""Weights with a LoRA adapter's change added: W + scale * B A, in float64, whenever a part of one is read.

A value has the same bits whatever part is read, so that ranks, which read parts, hold the weights of one
process: products have sizes that do not depend on the part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from compiled_mtp.models.headers import Header
from compiled_mtp.models.stored_weight import Region

# Rows of B that are multiplied at a time, from absolute rows on.
_TILE = 256


@dataclass(frozen=True)
class Change:
    """What is added to a weight. name: of a tensor of the adapter. shape: of the weight.

    add_to adds the change of a region to its values, float64 on any device, which are mutated.
    """

    name: str
    shape: tuple[int, ...]
    add_to: Callable[[torch.Tensor, Region], None]


def change_linear(a: Header, b: Header, scale: float) -> Change:
    """The change scale * B A of one linear [N, K], from matrices A [r, K] and B [N, r]."""

    def add_to(values: torch.Tensor, region: Region) -> None:
        rows, columns = region
        height, rank = b.shape
        whole_a = _to(a.read((slice(0, rank), slice(0, a.shape[1]))), values)
        for start in range(rows.start // _TILE * _TILE, rows.stop, _TILE):
            end = min(start + _TILE, height)
            added = _to(b.read((slice(start, end), slice(0, rank))), values) @ whole_a
            first, last = max(start, rows.start), min(end, rows.stop)
            part = added[first - start : last - start, columns] * scale
            values[first - rows.start : last - rows.start] += part

    return Change(b.name, (b.shape[0], a.shape[1]), add_to)


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


def change_stack(pair: StackPair) -> Change:
    """The change of a stack [E, N, K] that a checkpoint stores as one tensor."""

    def add_to(values: torch.Tensor, region: Region) -> None:
        experts, rows, columns = region
        for index, expert in enumerate(range(experts.start, experts.stop)):
            values[index] += pair.added(expert, values)[rows, columns]

    return Change(pair.b.name, (pair.num_experts, pair.b.shape[0], pair.a.shape[1]), add_to)


def change_expert(pair: StackPair, expert: int, first: int, num_rows: int) -> Change:
    """The change of `num_rows` rows of one expert, from row `first` of the stack on, stored as a matrix."""

    def add_to(values: torch.Tensor, region: Region) -> None:
        rows, columns = region
        own = slice(first + rows.start, first + rows.stop)
        values += pair.added(expert, values)[own, columns]

    return Change(pair.b.name, (num_rows, pair.a.shape[1]), add_to)


@dataclass(frozen=True)
class MergedWeight(Header):
    """A stored weight to which a change is added when it is read."""

    change: Change = field(kw_only=True)

    def read(self, region: Region, device: torch.device | None = None) -> torch.Tensor:
        """The float32 values in `region`, on `device` or on the CPU."""
        values = super().read(region, device).to(device, torch.float64)
        self.change.add_to(values, region)
        return values.float()


def _to(part: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return part.to(values.device, values.dtype)


@lru_cache(maxsize=1)
def _read_whole(header: Header) -> torch.Tensor:
    """A whole matrix. All experts of a layer read the same one after another, each some of its columns."""
    return header.read_whole()
