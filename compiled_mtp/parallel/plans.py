"""How messages of rank 0 reach the others: through memory that the processes share.

A ring of bytes with one writer and a reader a rank; each message is its length and its pickle. Readers look
at the ring for a moment and then sleep until a byte comes through their pipe. The memory is that of a file
without a name: it is gone with the last process.
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
# A word a cache line, since each has a writer of its own: the bytes written, then for each rank those that
# it has read, and whether it sleeps.
_LINE = 64
_MOST_RANKS = 8
_HEADER = _LINE * (1 + 2 * _MOST_RANKS)
# Of a message: its bytes, and their checksum, for machines on which one process may see another's writes in
# another order.
_HEAD = struct.Struct("<QI")
# Longer than the host needs between two steps; looking costs a core, so idle ranks sleep.
_LOOK_S = 0.001
# Should a reader fall asleep in the very moment in which the writer looked.
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
        """Where `size` bytes behind the first `at` of the stream lie: in one piece or in two."""
        first = at % CAPACITY
        yield slice(_HEADER + first, _HEADER + min(first + size, CAPACITY))
        if first + size > CAPACITY:
            yield slice(_HEADER, _HEADER + first + size - CAPACITY)


class PlanWriter(_Ring):
    """The writer for `world - 1` readers. Their processes inherit `file` and the reading ends of `pipes`, by
    rank from 1 on."""

    def __init__(self, world: int) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the ring
        self._file.truncate(_HEADER + CAPACITY)
        self.file = self._file.fileno()
        super().__init__(self.file)
        self.readers = range(1, world)
        self.pipes = {rank: os.pipe() for rank in self.readers}

    def send(self, message: Any, check: Callable[[], None]) -> None:
        """Write a message, in pieces if it is longer than the ring. `check` is called while readers are
        waited for, and raises where they will not come."""
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
        """The reader that has read least."""
        return min(self.readers, key=self._word)

    def close(self) -> None:
        """Give back what the processes do not hold themselves."""
        self._words.release()
        self._memory.close()
        self._file.close()
        for ends in self.pipes.values():
            for end in ends:
                os.close(end)


class PlanReader(_Ring):
    """The reader of `rank`; `file` and `pipe` are inherited."""

    def __init__(self, rank: int, file: int, pipe: int) -> None:
        super().__init__(file)
        self._rank, self._pipe = rank, pipe
        self._read = 0

    def receive(self) -> Any:
        """The next message, however long it takes. Raises RuntimeError for one that is not as it was sent."""
        size, checksum = _HEAD.unpack(self._take(_HEAD.size))
        pickled = self._take(size)
        if zlib.crc32(pickled) != checksum:
            raise RuntimeError(f"a message of {size} bytes came otherwise than it was sent")
        return pickle.loads(pickled)

    def _take(self, size: int) -> bytes:
        taken = bytearray()
        while len(taken) < size:
            there = self._wait() - self._read
            part = min(there, size - len(taken))
            for span in self._spans(self._read, part):
                taken += self._memory[span]
            self._read += part
            self._set_word(self._rank, self._read)
        return bytes(taken)

    def _wait(self) -> int:
        """Until something is written; returns how much is."""
        until = time.monotonic() + _LOOK_S
        while (written := self._word(0)) == self._read:
            if time.monotonic() < until:
                time.sleep(0)
                continue
            self._set_word(_MOST_RANKS + self._rank, 1)
            if self._word(0) == self._read and select.select([self._pipe], [], [], _SLEEP_S)[0]:
                os.read(self._pipe, 64)
        return written
