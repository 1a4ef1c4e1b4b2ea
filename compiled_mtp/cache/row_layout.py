"""Packs one row of each of several tensors into flat memory, and back, in few copies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

# Alignment in bytes: of a section that is viewed as another dtype, and of a packed row.
_SECTION_ALIGNMENT, ROW_ALIGNMENT = 16, 64


@dataclass(frozen=True, slots=True)
class _Section:
    """The bytes [begin, end) of a packed row that hold one tensor's row."""

    tensor: torch.Tensor
    begin: int
    end: int

    def within(self, memory: torch.Tensor) -> torch.Tensor:
        """Return this section of packed rows `memory` [..., row_bytes] in the tensor's dtype and shape."""
        part = memory[..., self.begin : self.end].view(self.tensor.dtype)
        return part.view((*memory.shape[:-1], *self.tensor.shape[1:]))


class RowLayout:
    """The rows of `tensors`, each [rows, ...], packed into row_bytes bytes.

    A tensor whose rows are not contiguous, because each layer has its own memory, takes a copy of its own.
    All others together take one copy to pack, and one per dtype to unpack.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        rows = {name: tensor[0] for name, tensor in tensors.items()}
        spread = [tensors[name] for name, row in rows.items() if not row.is_contiguous()]
        whole = [tensors[name] for name, row in rows.items() if row.is_contiguous()]
        # The widest elements come first: then all are aligned without gaps, and one copy packs them.
        whole.sort(key=lambda tensor: tensor.itemsize, reverse=True)
        end = 0
        self._spread, self._whole = list[_Section](), list[_Section]()
        for tensor in spread:
            begin = -(-end // _SECTION_ALIGNMENT) * _SECTION_ALIGNMENT
            end = begin + tensor[0].nbytes
            self._spread.append(_Section(tensor, begin, end))
        end = -(-end // _SECTION_ALIGNMENT) * _SECTION_ALIGNMENT
        for tensor in whole:
            begin, end = end, end + tensor[0].nbytes
            self._whole.append(_Section(tensor, begin, end))
        self.row_bytes = -(-end // ROW_ALIGNMENT) * ROW_ALIGNMENT

    def pack(self, row: int, target: torch.Tensor) -> None:
        """Copy a row of every tensor to `target` [row_bytes] uint8, on the same device."""
        for section in self._spread:
            section.within(target).copy_(section.tensor[row])
        if self._whole:
            parts = [section.tensor[row].reshape(-1).view(torch.uint8) for section in self._whole]
            torch.cat(parts, out=target[self._whole[0].begin : self._whole[-1].end])

    def unpack(self, row: int, source: torch.Tensor) -> None:
        """Copy `source` [row_bytes] uint8, on the same device, to a row of every tensor."""
        for section in self._spread:
            section.tensor[row].copy_(section.within(source))
        _copy_each(
            [section.tensor[row] for section in self._whole],
            [section.within(source) for section in self._whole],
        )

    def pack_many(self, rows: torch.Tensor, target: torch.Tensor) -> None:
        """Copy the rows [n] int64 of every tensor to `target` [n * row_bytes] uint8, on the same device."""
        flat = target.view(rows.numel(), self.row_bytes)
        for section in (*self._spread, *self._whole):
            torch.index_select(section.tensor, 0, rows, out=section.within(flat))

    def unpack_many(self, rows: torch.Tensor, source: torch.Tensor) -> None:
        """Copy `source` [n * row_bytes] uint8, on the same device, to the rows [n] int64 of every tensor."""
        flat = source.view(rows.numel(), self.row_bytes)
        for section in (*self._spread, *self._whole):
            section.tensor.index_copy_(0, rows, section.within(flat))


def _copy_each(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each source to its target with one launch per dtype."""
    for dtype in {target.dtype for target in targets}:
        own = [index for index, target in enumerate(targets) if target.dtype == dtype]
        torch._foreach_copy_([targets[i] for i in own], [sources[i] for i in own])
