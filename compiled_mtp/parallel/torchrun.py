"""Ranks that torchrun has started: they find rank 0, and do what it would have started processes for.

Rank 0 sends the order of an engine, with the file descriptors that go with it, through a socket of the
machine. The same socket tells each side of the other's end, so that nobody is left, and behind an engine that
is closed the ranks wait for the next.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import pickle
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

from compiled_mtp.config import Torchrun
from compiled_mtp.errors import fail
from compiled_mtp.parallel.forks import remove_own

# Until all are there: Python may be importing torch, or a script preparing something.
MEET_S = 120.0
_PAUSE_S = 0.05
_RANK_0, _LONGEST_ADDRESS = "rank_0", 107
# For a rank to end by itself when it is told to.
_END_S = 1.0
# In front of an order: the bytes of its pickle. Behind one that was carried out there is the byte.
_HEAD = struct.Struct("<Q")
_DONE = b"."


class Order(Protocol):
    """What goes to a rank: a dataclass, some of whose fields are file descriptors."""

    @property
    def rank(self) -> int: ...
    @property
    def folder(self) -> Path: ...
    @property
    def plans(self) -> int: ...
    @property
    def wake(self) -> int: ...
    @property
    def report(self) -> int: ...


def folder_of(torchrun: Torchrun) -> Path:
    """Where the processes of one start find each other: no other user can write there.

    Raises ValueError where another one has made it.
    """
    text = f"{torchrun.run_id} {torchrun.restart_count}"
    name = f"{os.getuid()}_{torchrun.master_port}_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    folder = Path(tempfile.gettempdir()) / f"compiled_mtp_torchrun_{name}"
    folder.mkdir(mode=0o700, exist_ok=True)
    made = folder.lstat()
    if made.st_uid != os.getuid() or made.st_mode & 0o077:
        raise fail("TMPDIR", "be a folder where nobody else writes for you", folder, "remove it")
    return folder


@contextmanager
def address_of(folder: Path) -> Iterator[str]:
    """Rank 0's socket in `folder`. The system takes at most 107 bytes, which a long TMPDIR exceeds: so by the
    folder's descriptor where there is such a path."""
    plain = folder / _RANK_0
    if len(os.fsencode(plain)) <= _LONGEST_ADDRESS or not Path("/proc/self/fd").is_dir():
        yield str(plain)
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield f"/proc/self/fd/{descriptor}/{_RANK_0}"
    finally:
        os.close(descriptor)


@functools.cache
def meeting_of(torchrun: Torchrun) -> Meeting:
    """This process' own: ranks come to it once, whatever number of engines it has."""
    return Meeting(torchrun)


class Meeting:
    """Where the other processes of a torchrun find rank 0, which is this one. From when it is made they know
    that rank 0 lives, and when it ends."""

    def __init__(self, torchrun: Torchrun) -> None:
        self.world = torchrun.world_size
        folder = folder_of(torchrun)
        self._listener = socket.socket(socket.AF_UNIX)
        # Of an earlier start that was killed.
        (folder / _RANK_0).unlink(missing_ok=True)
        with address_of(folder) as address:
            self._listener.bind(address)
        self._listener.listen(self.world)
        self._connections: dict[int, tuple[socket.socket, int]] = {}
        weakref.finalize(self, remove_own, folder, os.getpid())
        # What a fork holds open would hide the end of rank 0 from the others.
        close = weakref.WeakMethod(self._close)

        def close_copies() -> None:
            if (found := close()) is not None:
                found()

        os.register_at_fork(after_in_child=close_copies)

    def join(self, order: Order) -> JoinedRank:
        """Give a rank its order, once all are there. Raises ValueError if they do not come."""
        self._wait()
        return JoinedRank(*self._connections[order.rank], order)

    def dismiss(self) -> None:
        """Let ranks find this process before it ends, if they have not yet: else they would wait for it."""
        with suppress(ValueError, OSError):
            self._wait()

    def _close(self) -> None:
        self._listener.close()
        for connection, _ in self._connections.values():
            connection.close()

    def _wait(self) -> None:
        until = time.monotonic() + MEET_S
        while len(self._connections) < self.world - 1:
            self._listener.settimeout(max(until - time.monotonic(), _PAUSE_S))
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                missing = sorted({*range(1, self.world)} - self._connections.keys())
                rule = f"all create the engine within {MEET_S:.0f} s"
                remedy = "let every process run the same script"
                raise fail("ranks", rule, f"none from {missing}", remedy) from None
            connection.settimeout(MEET_S)
            hello = json.loads(connection.recv(256))
            self._connections[hello["rank"]] = connection, hello["process"]


class JoinedRank:
    """The process of a rank that torchrun has started, as `subprocess.Popen` has one that this process
    starts; its end is that of the engine for which it was joined."""

    def __init__(self, connection: socket.socket, pid: int, order: Order) -> None:
        self.pid = pid
        self.stdin = None
        self.returncode: int | None = None
        self._connection = connection
        connection.settimeout(MEET_S)
        pickled = pickle.dumps(order)
        with suppress(OSError):  # It has ended: its report says so.
            socket.send_fds(connection, [_HEAD.pack(len(pickled))], [order.plans, order.wake, order.report])
            connection.sendall(pickled)

    def wait(self, timeout: float | None = None) -> int:
        """As `Popen.wait`; 0 for an order that was carried out, 1 for a process that has ended."""
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                said = self._connection.recv(1)
            except TimeoutError:
                raise subprocess.TimeoutExpired("rank", timeout or 0.0) from None
            except OSError:
                said = b""
            self.returncode = 0 if said == _DONE else 1
        return self.returncode

    def kill(self) -> None:
        """End the process, whatever it does."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
        try:
            while not self.wait(_END_S):
                self.returncode = None
        except subprocess.TimeoutExpired:
            # It still holds the other end, so the number is its own.
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def follow(torchrun: Torchrun, carry_out: Callable[[Any], int]) -> None:
    """Carry out one order of rank 0 after the other, and end with it; in a process of another rank.

    carry_out returns 0 for an order that was carried out to its end. Raises ValueError where rank 0 does not
    come; else it does not return.
    """
    connection = _connect(torchrun)
    if threading.current_thread() is threading.main_thread():
        # torchrun sends them to all, and rank 0 sees to them.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    hello = {"rank": torchrun.rank, "process": os.getpid()}
    with suppress(OSError):  # Rank 0 has ended.
        connection.sendall(json.dumps(hello).encode())
    orders: SimpleQueue[tuple[Any, Sequence[int]]] = SimpleQueue()
    ends = threading.Thread(target=_receive, args=(connection, orders, folder_of(torchrun)), daemon=True)
    ends.start()
    while True:
        order, files = orders.get()
        code = carry_out(order)
        for file in files:
            os.close(file)
        if code:
            # Rank 0 has been told why, or finds it out, and says it before torchrun ends everything.
            ends.join()
        connection.sendall(_DONE)


def _connect(torchrun: Torchrun) -> socket.socket:
    until = time.monotonic() + MEET_S
    while time.monotonic() < until:
        connection = socket.socket(socket.AF_UNIX)
        try:
            with address_of(folder_of(torchrun)) as address:
                connection.connect(address)
            return connection
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            time.sleep(_PAUSE_S)
    rule, remedy = f"create an engine within {MEET_S:.0f} s", "let every process run the same script"
    raise fail("rank 0", rule, "none", remedy)


def _receive(connection: socket.socket, orders: SimpleQueue[Any], folder: Path) -> None:
    """Orders, and with the end of rank 0 that of this process."""
    folders = [folder]
    with suppress(OSError):
        while True:
            head = socket.recv_fds(connection, _HEAD.size, 3)
            said, files, *_ = head
            size = _HEAD.unpack(said + _take(connection, _HEAD.size - len(said)))[0]
            order = pickle.loads(_take(connection, size))
            plans, wake, report = files
            folders[1:] = [order.folder]
            orders.put((dataclasses.replace(order, plans=plans, wake=wake, report=report), files))
    # Where rank 0 was killed nobody else does.
    for each in folders:
        shutil.rmtree(each, ignore_errors=True)
    with suppress(Exception):
        sys.stdout.flush()
    os._exit(0)


def _take(connection: socket.socket, size: int) -> bytes:
    taken = b""
    while len(taken) < size:
        piece = connection.recv(size - len(taken))
        if not piece:
            raise ConnectionError
        taken += piece
    return taken
