"""Sends rank 0's messages to the other ranks through memory that the processes share.

A ring of bytes with one writer and one reader per rank. Each message is its length, its checksum and its
pickle. A reader polls the ring for a moment and then sleeps until a byte comes through its pipe. The memory
belongs to a file without a name, which disappears with the last process.
"""

from __future__ import annotations

import mmap
import os
import pickle
import select
import struct
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

CAPACITY = 1 << 20
# One word per cache line, since each word has its own writer: the bytes written, then for each rank the bytes
# that it has read, then for each rank whether it sleeps.
_LINE = 64
_MOST_RANKS = 8
_HEADER = _LINE * (1 + 2 * _MOST_RANKS)
# A message's length in bytes and its checksum: on some machines a process may see another's writes out of
# order.
_HEAD = struct.Struct("<QI")
# Longer than the host needs between two steps. Polling keeps a core busy, so idle ranks sleep.
_POLL_S = 0.001
# A bound on each sleep: the writer misses a reader that falls asleep just after the writer checked.
_SLEEP_S = 0.02
_PAUSE_S = 0.00005


class _Ring:
    def __init__(self, file: int) -> None:
        self._memory = mmap.mmap(file, _HEADER + CAPACITY)
        self._words = memoryview(self._memory)[:_HEADER].cast("Q")

    def _word(self, line: int) -> int:
        return self._words[line * _LINE // 8]

    def _set_word(self, line: int, value: int) -> None:
        self._words[line * _LINE // 8] = value

    def _spans(self, at: int, size: int) -> Iterator[slice]:
        """Yield the one or two slices of the memory for `size` bytes of the stream from byte `at` on."""
        first = at % CAPACITY
        yield slice(_HEADER + first, _HEADER + min(first + size, CAPACITY))
        if first + size > CAPACITY:
            yield slice(_HEADER, _HEADER + first + size - CAPACITY)


class PlanWriter(_Ring):
    """The writer for `world - 1` readers, whose processes inherit `file` and their pipe's reading end.

    pipes: (reading end, writing end) of each rank from 1 on.
    """

    def __init__(self, world: int) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the ring
        self._file.truncate(_HEADER + CAPACITY)
        self.file = self._file.fileno()
        super().__init__(self.file)
        self.readers = range(1, world)
        self.pipes = {rank: os.pipe() for rank in self.readers}

    def send(self, message: Any, check: Callable[[], None]) -> None:
        """Write a message, in parts if it is longer than the ring.

        Calls `check`, which may raise, again and again while it waits for readers.
        """
        pickled = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        left = memoryview(_HEAD.pack(len(pickled), zlib.crc32(pickled)) + pickled)
        while left:
            written = self._word(0)
            room = CAPACITY - written + min(self._word(rank) for rank in self.readers)
            if not room:
                check()
                time.sleep(_PAUSE_S)
                continue
            part, left = left[:room], left[room:]
            done = 0
            for span in self._spans(written, len(part)):
                size = span.stop - span.start
                self._memory[span] = part[done : done + size]
                done += size
            self._set_word(0, written + len(part))
            for rank in self.readers:
                if self._word(_MOST_RANKS + rank):
                    self._set_word(_MOST_RANKS + rank, 0)
                    os.write(self.pipes[rank][1], b"\n")

    @property
    def slowest(self) -> int:
        """The rank that has read least."""
        return min(self.readers, key=self._word)

    def close(self) -> None:
        """Close this process' files and memory; readers keep their own."""
        self._words.release()
        self._memory.close()
        self._file.close()
        for ends in self.pipes.values():
            for end in ends:
                os.close(end)


class PlanReader(_Ring):
    """The reader of `rank`. file, pipe: descriptors inherited from rank 0's process."""

    def __init__(self, rank: int, file: int, pipe: int) -> None:
        super().__init__(file)
        self._rank, self._pipe = rank, pipe
        self._read = 0

    def receive(self) -> Any:
        """Wait for the next message and return it. Raises RuntimeError for a wrong checksum."""
        size, checksum = _HEAD.unpack(self._take(_HEAD.size))
        pickled = self._take(size)
        if zlib.crc32(pickled) != checksum:
            raise RuntimeError(f"the checksum of a message of {size} bytes is wrong")
        return pickle.loads(pickled)

    def _take(self, size: int) -> bytes:
        taken = bytearray()
        while len(taken) < size:
            available = self._wait() - self._read
            part = min(available, size - len(taken))
            for span in self._spans(self._read, part):
                taken += self._memory[span]
            self._read += part
            self._set_word(self._rank, self._read)
        return bytes(taken)

    def _wait(self) -> int:
        """Wait for unread bytes; return how many bytes were written in all."""
        until = time.monotonic() + _POLL_S
        while (written := self._word(0)) == self._read:
            if time.monotonic() < until:
                time.sleep(0)
                continue
            self._set_word(_MOST_RANKS + self._rank, 1)
            if self._word(0) == self._read and select.select([self._pipe], [], [], _SLEEP_S)[0]:
                os.read(self._pipe, 64)
        return written
