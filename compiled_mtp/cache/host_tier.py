"""Host memory for rows and blocks that leave the device: pinned with a GPU, and allocated at first use."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import groupby
from typing import NamedTuple

import torch

# Bytes of a segment: blocks are allocated, and copied, by segments.
SEGMENT_BYTES = 1 << 24
# The part of a segment that may be lost to rounding.
_MOST_WASTE = 0.08
# Bytes of the buffers of a record: the most, and the least of all but the last.
_MOST_BUFFER_BYTES, _LEAST_BUFFER_BYTES = 1 << 26, 1 << 20
# Records, and segments, that the thread allocates ahead once the first of them is taken.
_NUM_AHEAD = 2


class _Supply:
    """Gives out at most `most` results of `make`, each a list of buffers.

    Once the first is taken, a thread keeps a few ready, since pinning takes about half a second per GiB.
    Without a thread each is made when it is taken.
    """

    def __init__(
        self, make: Callable[[], list[torch.Tensor]], most: int, thread: ThreadPoolExecutor | None
    ) -> None:
        self._make = make
        self._num_left = most
        self._thread = thread
        self._coming: deque[Future[list[torch.Tensor]]] = deque()

    def take(self) -> list[torch.Tensor]:
        """Return the next one. Raises RuntimeError or MemoryError if there is no memory for it."""
        coming = self._coming.popleft() if self._coming else None
        # Retry if the thread's allocation failed: memory may be free by now.
        made = self._make() if coming is None or coming.exception() is not None else coming.result()
        self._num_left -= coming is None
        while self._thread is not None and self._num_left > 0 and len(self._coming) < _NUM_AHEAD:
            self._coming.append(self._thread.submit(self._make))
            self._num_left -= 1
        return made

    @property
    def ready(self) -> list[torch.Tensor]:
        """The buffers that are made and not taken yet."""
        done = [one for one in self._coming if one.done() and one.exception() is None]
        return [tensor for one in done for tensor in one.result()]


class _Run(NamedTuple):
    """Consecutive host blocks: `memory` [n, block_bytes] holds those at `indices` of the caller's list."""

    indices: list[int]
    memory: torch.Tensor


class HostTier:
    """Host memory for num_records rows of row_bytes and num_blocks blocks of block_bytes of a device.

    Allocated memory is kept to the end. With a GPU a thread allocates ahead, so that no decode round waits
    for the system to pin memory.
    """

    def __init__(
        self, row_bytes: int, block_bytes: int, num_records: int, num_blocks: int, device: torch.device
    ) -> None:
        self.num_records = num_records
        self.num_blocks = num_blocks
        self._block_bytes = block_bytes
        self._is_pinned = device.type == "cuda"
        # The allocator of pinned memory rounds each buffer up to a power of two.
        self._buffer_bytes = _powers_of_two(row_bytes) if self._is_pinned else [row_bytes]
        self._segment = max(min(blocks_in_segment(block_bytes), num_blocks), 1)
        self._records: dict[int, list[torch.Tensor]] = {}
        self._segments: dict[int, torch.Tensor] = {}
        # The thread ends with the tier or the interpreter, after the allocation that it has begun.
        thread = ThreadPoolExecutor(1, "host memory") if self._is_pinned else None
        self._new_records = _Supply(
            partial(_allocate_all, self._buffer_bytes, self._is_pinned), num_records, thread
        )
        segment_bytes = [self._segment * block_bytes]
        self._new_segments = _Supply(
            partial(_allocate_all, segment_bytes, self._is_pinned), -(-num_blocks // self._segment), thread
        )

    @property
    def most_bytes_at_once(self) -> int:
        """Bytes of a row or of a segment of blocks, whichever is more: the most that one copy moves."""
        return max(sum(self._buffer_bytes), self._segment * self._block_bytes)

    def reserve(self, record: int | None, block_ids: Iterable[int]) -> None:
        """Allocate the memory of a record, unless None, and of blocks, where they have none yet.

        Raises RuntimeError or MemoryError if there is no memory.
        """
        if record is not None and record not in self._records:
            self._records[record] = self._new_records.take()
        for segment in sorted({block_id // self._segment for block_id in block_ids} - self._segments.keys()):
            (memory,) = self._new_segments.take()
            self._segments[segment] = memory.view(self._segment, self._block_bytes)

    def buffers(self, record: int) -> list[torch.Tensor]:
        """Return the uint8 buffers of a reserved record, in order; one without a GPU."""
        return self._records[record]

    def runs(self, block_ids: Sequence[int]) -> Iterator[_Run]:
        """Yield the memory of reserved blocks in as few runs as possible."""
        in_order = sorted(range(len(block_ids)), key=block_ids.__getitem__)
        # Consecutive blocks of one segment have the same difference between block id and sorted index.
        distance = [
            (block_ids[index] - at, block_ids[index] // self._segment) for at, index in enumerate(in_order)
        ]
        for _, run in groupby(range(len(in_order)), distance.__getitem__):
            indices = [in_order[at] for at in run]
            segment, first = divmod(block_ids[indices[0]], self._segment)
            yield _Run(indices, self._segments[segment][first : first + len(indices)])

    @property
    def allocated_bytes(self) -> int:
        """Bytes allocated so far; pinned buffers count as the powers of two that they take."""
        buffers = [buffer for record in self._records.values() for buffer in record]
        ready = [*self._new_records.ready, *self._new_segments.ready]
        sizes = [buffer.nbytes for buffer in (*buffers, *self._segments.values(), *ready)]
        return sum(1 << (size - 1).bit_length() for size in sizes) if self._is_pinned else sum(sizes)


class Staging:
    """Copies packed rows from a device to host memory and back.

    A GPU copies to and from host memory in one transfer only between flat buffers, so rows are packed in a
    buffer on the device. On a CPU they are packed directly into host memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)

    def reserve(self, num_bytes: int) -> None:
        """Make the buffer hold num_bytes. Raises RuntimeError if the device has no memory for it."""
        if self._device.type != "cpu" and num_bytes > self._buffer.numel():
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def store(self, pack: Callable[[torch.Tensor], None], buffers: Sequence[torch.Tensor]) -> None:
        """Let `pack` fill flat memory on the device, and copy it to host `buffers`."""
        flat = self._flat(buffers)
        pack(flat)
        copy_out(flat, buffers)

    def load(self, buffers: Sequence[torch.Tensor], unpack: Callable[[torch.Tensor], None]) -> None:
        """Copy host `buffers` to flat memory on the device, and pass it to `unpack`."""
        flat = self._flat(buffers)
        copy_in(buffers, flat)
        unpack(flat)

    def _flat(self, buffers: Sequence[torch.Tensor]) -> torch.Tensor:
        if self._device.type == "cpu":
            (buffer,) = buffers
            return buffer
        size = sum(buffer.numel() for buffer in buffers)
        assert size <= self._buffer.numel(), f"{size} bytes to pack, {self._buffer.numel()} were reserved"
        return self._buffer[:size]


def copy_out(flat: torch.Tensor, buffers: Sequence[torch.Tensor]) -> None:
    """Copy flat device memory to host buffers of the same total size; no copy where both are one memory."""
    parts = flat.split([buffer.numel() for buffer in buffers])
    for buffer, part in zip(buffers, parts, strict=True):
        if buffer.data_ptr() != part.data_ptr():
            buffer.copy_(part, non_blocking=True)


def copy_in(buffers: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
    """Copy host buffers to flat device memory; no copy where both are one memory."""
    parts = flat.split([buffer.numel() for buffer in buffers])
    for buffer, part in zip(buffers, parts, strict=True):
        if buffer.data_ptr() != part.data_ptr():
            part.copy_(buffer, non_blocking=True)


def _allocate_all(sizes: Sequence[int], is_pinned: bool) -> list[torch.Tensor]:
    return [_allocate(size, is_pinned) for size in sizes]


def _allocate(num_bytes: int, is_pinned: bool) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)


def blocks_in_segment(block_bytes: int) -> int:
    """Return the blocks of one segment: about SEGMENT_BYTES, or up to four times that where blocks fill the
    power of two, to which the allocator rounds pinned memory, better."""
    size = max(block_bytes, 1)
    powers = [power for power in (SEGMENT_BYTES << shift for shift in range(3)) if power >= size]
    if not powers:
        return 1
    wasted = {power: power % size / power for power in powers}
    filled = [power for power in powers if wasted[power] <= _MOST_WASTE]
    return (filled[0] if filled else min(powers, key=wasted.__getitem__)) // size


def _powers_of_two(num_bytes: int) -> list[int]:
    """Return sizes with the sum num_bytes, all but the last powers of two."""
    sizes = []
    while num_bytes > _LEAST_BUFFER_BYTES:
        sizes.append(min(1 << (num_bytes.bit_length() - 1), _MOST_BUFFER_BYTES))
        num_bytes -= sizes[-1]
    return [*sizes, num_bytes] if num_bytes else sizes
