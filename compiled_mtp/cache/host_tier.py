"""Host memory for what leaves the device: pinned beside a GPU, and allocated when somebody first needs it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import groupby
from typing import NamedTuple

import torch

# Blocks are allocated, and copied, so many bytes at a time.
SEGMENT_BYTES = 1 << 24
# Of a segment, the part that may be lost to rounding.
_MOST_WASTE = 0.08
# Rows lie in pieces of at most, and but for the last of at least, so many bytes.
_MOST_PIECE_BYTES, _LEAST_PIECE_BYTES = 1 << 26, 1 << 20


# Records, and segments, that are made ready once the first of them has been needed.
_NUM_AHEAD = 2


class _Supply:
    """At most `most` times what `make` gives. Pinning takes about half a second a GiB: once the first has
    been taken, a thread keeps a few ready. Without a thread each is made when it is taken.
    """

    def __init__(
        self, make: Callable[[], list[torch.Tensor]], most: int, thread: ThreadPoolExecutor | None
    ) -> None:
        self._make = make
        self._num_left = most
        self._thread = thread
        self._coming: deque[Future[list[torch.Tensor]]] = deque()

    def take(self) -> list[torch.Tensor]:
        """One of them. Raises RuntimeError or MemoryError if it cannot be had."""
        coming = self._coming.popleft() if self._coming else None
        # What could not be had then may be had now.
        made = self._make() if coming is None or coming.exception() is not None else coming.result()
        self._num_left -= coming is None
        while self._thread is not None and self._num_left > 0 and len(self._coming) < _NUM_AHEAD:
            self._coming.append(self._thread.submit(self._make))
            self._num_left -= 1
        return made

    @property
    def ready(self) -> list[torch.Tensor]:
        """What is made and was not taken yet."""
        done = [one for one in self._coming if one.done() and one.exception() is None]
        return [tensor for one in done for tensor in one.result()]


class _Run(NamedTuple):
    """Blocks that lie behind one another: `memory` [n, block_bytes] has those at `indices` of a list."""

    indices: list[int]
    memory: torch.Tensor


class HostTier:
    """Room for num_records rows of row_bytes and for num_blocks blocks of block_bytes of a device.

    Memory that was allocated once is kept. Beside a GPU a thread makes a little more ready than was needed so
    far, since nobody who decodes can wait for the system to pin it.
    """

    def __init__(
        self, row_bytes: int, block_bytes: int, num_records: int, num_blocks: int, device: torch.device
    ) -> None:
        self.num_records = num_records
        self.num_blocks = num_blocks
        self._block_bytes = block_bytes
        self._is_pinned = device.type == "cuda"
        # Pinned memory comes in powers of two.
        self._piece_bytes = _powers_of_two(row_bytes) if self._is_pinned else [row_bytes]
        self._segment = max(min(blocks_in_segment(block_bytes), num_blocks), 1)
        self._records: dict[int, list[torch.Tensor]] = {}
        self._segments: dict[int, torch.Tensor] = {}
        # Ends with the tier, or with the interpreter, behind what it has begun.
        thread = ThreadPoolExecutor(1, "host memory") if self._is_pinned else None
        self._new_records = _Supply(
            partial(_allocate_all, self._piece_bytes, self._is_pinned), num_records, thread
        )
        segment_bytes = [self._segment * block_bytes]
        self._new_segments = _Supply(
            partial(_allocate_all, segment_bytes, self._is_pinned), -(-num_blocks // self._segment), thread
        )

    @property
    def most_bytes_at_once(self) -> int:
        """Bytes of a row, or of a segment of blocks: the most that one copy takes."""
        return max(sum(self._piece_bytes), self._segment * self._block_bytes)

    def reserve(self, record: int | None, block_ids: Iterable[int]) -> None:
        """Have the memory of a record, if one is given, and blocks. Raises RuntimeError or MemoryError if it
        cannot be had.
        """
        if record is not None and record not in self._records:
            self._records[record] = self._new_records.take()
        for segment in sorted({block_id // self._segment for block_id in block_ids} - self._segments.keys()):
            (memory,) = self._new_segments.take()
            self._segments[segment] = memory.view(self._segment, self._block_bytes)

    def pieces(self, record: int) -> list[torch.Tensor]:
        """A record's bytes, in their order; it must have been reserved. Without a GPU they are one piece."""
        return self._records[record]

    def runs(self, block_ids: Sequence[int]) -> Iterator[_Run]:
        """The memory of blocks, as few parts as there are; they must have been reserved."""
        in_order = sorted(range(len(block_ids)), key=block_ids.__getitem__)
        # What lies behind one another in a segment keeps its distance from its place in the order.
        distance = [
            (block_ids[index] - at, block_ids[index] // self._segment) for at, index in enumerate(in_order)
        ]
        for _, places in groupby(range(len(in_order)), distance.__getitem__):
            indices = [in_order[at] for at in places]
            segment, first = divmod(block_ids[indices[0]], self._segment)
            yield _Run(indices, self._segments[segment][first : first + len(indices)])

    @property
    def allocated_bytes(self) -> int:
        """Bytes that have been needed so far, or are ready; pinned ones as they are given out."""
        pieces = [piece for record in self._records.values() for piece in record]
        ready = [*self._new_records.ready, *self._new_segments.ready]
        sizes = [piece.nbytes for piece in (*pieces, *self._segments.values(), *ready)]
        return sum(1 << (size - 1).bit_length() for size in sizes) if self._is_pinned else sum(sizes)


class Staging:
    """Brings packed rows from a device to host memory and back.

    Between a GPU and host memory only what is flat on both sides is copied at once, so that rows are packed
    into a buffer there. On a CPU they are packed where they go.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)

    def reserve(self, num_bytes: int) -> None:
        """Have a buffer for so many bytes at once. Raises RuntimeError if the device has no memory for it."""
        if self._device.type != "cpu" and num_bytes > self._buffer.numel():
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def store(self, pack: Callable[[torch.Tensor], None], pieces: Sequence[torch.Tensor]) -> None:
        """Have `pack` fill flat memory of the device, and copy that to `pieces`."""
        flat = self._flat(pieces)
        pack(flat)
        copy_out(flat, pieces)

    def load(self, pieces: Sequence[torch.Tensor], unpack: Callable[[torch.Tensor], None]) -> None:
        """Copy `pieces` to flat memory of the device, and give that to `unpack`."""
        flat = self._flat(pieces)
        copy_in(pieces, flat)
        unpack(flat)

    def _flat(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        if self._device.type == "cpu":
            (piece,) = pieces
            return piece
        size = sum(piece.numel() for piece in pieces)
        assert size <= self._buffer.numel(), f"{size} bytes to pack, {self._buffer.numel()} were reserved"
        return self._buffer[:size]


def copy_out(flat: torch.Tensor, pieces: Sequence[torch.Tensor]) -> None:
    """Copy flat memory of a device to host memory, which may be the same memory."""
    parts = flat.split([piece.numel() for piece in pieces])
    for piece, part in zip(pieces, parts, strict=True):
        if piece.data_ptr() != part.data_ptr():
            piece.copy_(part, non_blocking=True)


def copy_in(pieces: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
    """The way back."""
    parts = flat.split([piece.numel() for piece in pieces])
    for piece, part in zip(pieces, parts, strict=True):
        if piece.data_ptr() != part.data_ptr():
            part.copy_(piece, non_blocking=True)


def _allocate_all(sizes: Sequence[int], is_pinned: bool) -> list[torch.Tensor]:
    return [_allocate(size, is_pinned) for size in sizes]


def _allocate(num_bytes: int, is_pinned: bool) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)


def blocks_in_segment(block_bytes: int) -> int:
    """How many blocks are taken at once: about SEGMENT_BYTES, or more where a power of two is better filled,
    in which pinned memory comes."""
    size = max(block_bytes, 1)
    powers = [power for power in (SEGMENT_BYTES << shift for shift in range(3)) if power >= size]
    if not powers:
        return 1
    wasted = {power: power % size / power for power in powers}
    filled = [power for power in powers if wasted[power] <= _MOST_WASTE]
    return (filled[0] if filled else min(powers, key=wasted.__getitem__)) // size


def _powers_of_two(num_bytes: int) -> list[int]:
    """Sizes that sum up to num_bytes and are powers of two, but for the last."""
    sizes = []
    while num_bytes > _LEAST_PIECE_BYTES:
        sizes.append(min(1 << (num_bytes.bit_length() - 1), _MOST_PIECE_BYTES))
        num_bytes -= sizes[-1]
    return [*sizes, num_bytes] if num_bytes else sizes
