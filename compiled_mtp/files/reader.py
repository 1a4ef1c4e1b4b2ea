"""Reads ranges of bytes from files, with several threads, into host memory or to a GPU.

A mapped file costs a page fault for every few pages; a read into memory that is used again costs none. To a
GPU, bytes go through two pinned buffers by turns: the GPU copies from one while the threads fill the other,
and the caller need not wait for either.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import operator
import os
import weakref
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias

import torch

from compiled_mtp.errors import fail

Run: TypeAlias = tuple[int, int]
"""Consecutive bytes of a file: the offset of the first one, and their number."""

_MOST_THREADS = 8
# Bytes that one thread reads at a time; fewer in all are read without threads.
_TASK_BYTES = 4 << 20
# Bytes of a pinned buffer.
_BUFFER_BYTES = 32 << 20


class FileReader:
    """Reads from files that it opens at their first read and keeps open as long as it lives."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._staging: dict[torch.device, _Staging] = {}
        weakref.finalize(self, _close, self._descriptors)

    def read(self, file: Path, runs: Iterable[Run], device: torch.device | None = None) -> torch.Tensor:
        """Return the bytes of `runs`, one after another: uint8 on `device`, or on the CPU without one.

        Raises ValueError for a file that ends before them, or that cannot be opened.
        """
        runs = list(runs)
        total = sum(count for _, count in runs)
        if device is None or device.type == "cpu":
            out = torch.empty(total, dtype=torch.uint8)
            self._fill(file, runs, out)
            return out
        out = torch.empty(total, dtype=torch.uint8, device=device)
        if device not in self._staging:
            self._staging[device] = _Staging()
        staging, at = self._staging[device], 0
        for part in _parts(runs, _BUFFER_BYTES):
            size = sum(count for _, count in part)
            with torch.cuda.device(device):
                buffer = staging.take()
                self._fill(file, part, buffer[:size])
                out[at : at + size].copy_(buffer[:size], non_blocking=True)
                staging.give()
            at += size
        return out

    def _fill(self, file: Path, runs: Sequence[Run], out: torch.Tensor) -> None:
        descriptor, memory = self._open(file), _memory(out)
        tasks, at = [], 0
        for part in _parts(runs, _TASK_BYTES):
            tasks.append((part, at))
            at += sum(count for _, count in part)

        def read(task: tuple[Sequence[Run], int]) -> None:
            part, at = task
            for offset, count in part:
                _read_exactly(file, descriptor, offset, memory[at : at + count])
                at += count

        if len(tasks) < 2:
            for task in tasks:
                read(task)
            return
        if self._pool is None:
            threads = min(_MOST_THREADS, os.cpu_count() or 1)
            self._pool = ThreadPoolExecutor(threads, thread_name_prefix="file-reader")
        for _ in self._pool.map(read, tasks):
            pass

    def _open(self, file: Path) -> int:
        if file not in self._descriptors:
            try:
                self._descriptors[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise fail(str(file), "be a readable file", error, "check the path") from None
        return self._descriptors[file]


class _Staging:
    """Two pinned buffers that are used by turns."""

    def __init__(self) -> None:
        self._buffers = [torch.empty(_BUFFER_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in self._buffers]
        self._turn = 0

    def take(self) -> torch.Tensor:
        """The next buffer, once the copy from it has ended."""
        self._copied[self._turn].synchronize()
        return self._buffers[self._turn]

    def give(self) -> None:
        """The copy from the buffer that was taken is enqueued."""
        self._copied[self._turn].record()
        self._turn = 1 - self._turn


def runs_of(start: int, shape: Sequence[int], region: Sequence[slice], itemsize: int) -> Iterator[Run]:
    """Yield the bytes of a region of a row-major tensor that begins at byte `start`, in order.

    region: one range per dimension, with both ends given.
    """
    inner, last = itemsize, len(shape)
    # Dimensions of which the region takes everything belong to one run, and so does the dimension before.
    while last and region[last - 1] == slice(0, shape[last - 1]):
        last -= 1
        inner *= shape[last]
    if not last:
        yield start, inner
        return
    last -= 1
    first, count = region[last].start * inner, (region[last].stop - region[last].start) * inner
    strides = [inner * math.prod(shape[at + 1 : last + 1]) for at in range(last)]
    for index in itertools.product(*(range(part.start, part.stop) for part in region[:last])):
        if count:
            yield start + first + sum(map(operator.mul, index, strides)), count


def _parts(runs: Iterable[Run], most: int) -> Iterator[list[Run]]:
    """Yield the runs in groups of at most `most` bytes, long runs cut."""
    group: list[Run] = []
    size = 0
    for offset, count in runs:
        while count:
            own = min(count, most - size)
            group.append((offset, own))
            offset, count, size = offset + own, count - own, size + own
            if size == most:
                yield group
                group, size = [], 0
    if group:
        yield group


def _memory(out: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU; it keeps the tensor, for threads that outlive errors."""
    array = (ctypes.c_char * out.nbytes).from_address(out.data_ptr())
    array.tensor = out  # type: ignore[attr-defined]
    return memoryview(array).cast("B")


def _read_exactly(file: Path, descriptor: int, offset: int, out: memoryview) -> None:
    done = 0
    while done < len(out):
        # The system reads at most 2 GiB per call.
        read = os.preadv(descriptor, [out[done:]], offset + done)
        if not read:
            rule, remedy = "stay unchanged while it is loaded", "start again"
            raise fail(str(file), rule, f"{len(out) - done} bytes fewer", remedy)
        done += read


def _close(descriptors: dict[Path, int]) -> None:
    for descriptor in descriptors.values():
        os.close(descriptor)
    descriptors.clear()
