"""How the rows of several tensors lie behind one another in flat memory, and the few copies that bring them
there and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

# Of a section that is read as another dtype, and of a whole row.
_SECTION_ALIGNMENT, ROW_ALIGNMENT = 16, 64


@dataclass(frozen=True, slots=True)
class _Section:
    """Where one tensor's row lies: bytes begin to end."""

    tensor: torch.Tensor
    begin: int
    end: int

    def within(self, memory: torch.Tensor) -> torch.Tensor:
        """This section of flat rows `memory` [..., row_bytes], as what it is."""
        part = memory[..., self.begin : self.end].view(self.tensor.dtype)
        return part.view((*memory.shape[:-1], *self.tensor.shape[1:]))


class RowLayout:
    """The rows of `tensors`, each [rows, ...], packed into row_bytes bytes.

    A tensor whose rows are spread over memory, since layers lie behind one another, takes a copy of its own;
    all others together take one, or one a dtype on their way back.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        rows = {name: tensor[0] for name, tensor in tensors.items()}
        spread = [tensors[name] for name, row in rows.items() if not row.is_contiguous()]
        whole = [tensors[name] for name, row in rows.items() if row.is_contiguous()]
        # Nothing lies between those that are packed in one copy: the widest elements come first.
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
    """A launch a dtype, however many there are."""
    for dtype in {target.dtype for target in targets}:
        own = [index for index, target in enumerate(targets) if target.dtype == dtype]
        torch._foreach_copy_([targets[i] for i in own], [sources[i] for i in own])
