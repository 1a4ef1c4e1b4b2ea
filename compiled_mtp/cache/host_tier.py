"""Host memory that requests leave for: pinned beside a GPU, and allocated when somebody first needs it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch

# Pinned memory comes in powers of two: what is larger than this is put together from several pieces.
_PIECE_BYTES = 1 << 24
_ALIGNMENT = 64
# Blocks are allocated so many bytes at a time.
_SEGMENT_BYTES = 1 << 26


class HostTier:
    """Room for num_records rows of every tensor in `rows` [places, ...], and for num_blocks blocks of every
    one in `blocks` [blocks, ...]. Memory that was allocated once is kept.
    """

    def __init__(
        self,
        rows: Mapping[str, torch.Tensor],
        blocks: Mapping[str, torch.Tensor],
        num_records: int,
        num_blocks: int,
    ) -> None:
        self.num_records = num_records
        self.num_blocks = num_blocks
        self._rows = dict(rows)
        self._blocks = dict(blocks)
        block_bytes = sum(pages[0].nbytes for pages in self._blocks.values())
        self._segment = max(min(_SEGMENT_BYTES // max(block_bytes, 1), num_blocks), 1)
        # Of each record its rows, of each segment its blocks, by name.
        self._records: dict[int, dict[str, torch.Tensor]] = {}
        self._segments: dict[int, dict[str, torch.Tensor]] = {}

    def reserve(self, record: int, block_ids: Iterable[int]) -> None:
        """Have the memory of a record and blocks. Raises RuntimeError or MemoryError if it cannot be had."""
        if record not in self._records:
            self._records[record] = _allocate(self._rows, None)
        for segment in sorted({block_id // self._segment for block_id in block_ids} - self._segments.keys()):
            self._segments[segment] = _allocate(self._blocks, self._segment)

    def row(self, name: str, record: int) -> torch.Tensor:
        """A record's row of the tensor `name`; the record must have been reserved."""
        return self._records[record][name]

    def block(self, name: str, block_id: int) -> torch.Tensor:
        """A block of the pages `name`; it must have been reserved."""
        return self._segments[block_id // self._segment][name][block_id % self._segment]

    @property
    def allocated_bytes(self) -> int:
        """Bytes that requests have needed so far."""
        parts = [*self._records.values(), *self._segments.values()]
        return sum(tensor.nbytes for part in parts for tensor in part.values())


def _allocate(like: Mapping[str, torch.Tensor], count: int | None) -> dict[str, torch.Tensor]:
    """Host tensors of one row, or of `count` rows, of each of `like`, in few allocations."""
    made: dict[str, torch.Tensor] = {}
    piece, used = torch.empty(0, dtype=torch.uint8), 0
    left = sum(_size(tensor, count) for tensor in like.values())
    for name, tensor in like.items():
        size = _size(tensor, count)
        if used + size > piece.numel():
            piece = torch.empty(
                max(min(left, _PIECE_BYTES), size), dtype=torch.uint8, pin_memory=tensor.is_cuda
            )
            used = 0
        shape = tensor.shape[1:] if count is None else (count, *tensor.shape[1:])
        raw = piece[used : used + math.prod(shape) * tensor.itemsize]
        made[name] = raw.view(tensor.dtype).view(shape)
        used, left = used + size, left - size
    return made


def _size(tensor: torch.Tensor, count: int | None) -> int:
    row_bytes = math.prod(tensor.shape[1:]) * tensor.itemsize
    return -(-row_bytes * (1 if count is None else count) // _ALIGNMENT) * _ALIGNMENT
