"""Ranks that torchrun has started: they connect to rank 0 and run its jobs in place of new processes.

Rank 0 sends the job of an engine, with its file descriptors, through a Unix socket. The same socket tells
each side when the other ends, so that no process remains. After an engine is closed the ranks wait for the
next job.
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

# For all ranks to connect: a process may still import torch, or the script may prepare something.
RENDEZVOUS_S = 120.0
_PAUSE_S = 0.05
_RANK_0, _LONGEST_ADDRESS = "rank_0", 107
# For a rank to end by itself when rank 0 tells it to.
_END_S = 1.0
# Before a job: the length of its pickle in bytes. A rank answers a job that ran to its end with _DONE.
_HEAD = struct.Struct("<Q")
_DONE = b"."


class Job(Protocol):
    """The message to a rank: a dataclass with three file descriptors (`ranks.RankJob`)."""

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
    """Return the folder in which the processes of one torchrun find each other; only this user has access.

    Raises ValueError if another user has made it.
    """
    text = f"{torchrun.run_id} {torchrun.restart_count}"
    name = f"{os.getuid()}_{torchrun.master_port}_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    folder = Path(tempfile.gettempdir()) / f"compiled_mtp_torchrun_{name}"
    folder.mkdir(mode=0o700, exist_ok=True)
    made = folder.lstat()
    if made.st_uid != os.getuid() or made.st_mode & 0o077:
        raise fail("TMPDIR", "hold a folder that only you may access", folder, "remove it")
    return folder


@contextmanager
def address_of(folder: Path) -> Iterator[str]:
    """Yield the address of rank 0's socket in `folder`.

    An address has at most 107 bytes. A longer one, from a long TMPDIR, is replaced by a path through the
    folder's descriptor in /proc, if the system has that.
    """
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
def rendezvous_of(torchrun: Torchrun) -> Rendezvous:
    """Return this process' one `Rendezvous`: ranks connect once, however many engines it creates."""
    return Rendezvous(torchrun)


class Rendezvous:
    """Rank 0's socket, to which the other processes of a torchrun connect.

    From its creation on they know that rank 0 lives, and they find out when it ends.
    """

    def __init__(self, torchrun: Torchrun) -> None:
        self.world = torchrun.world_size
        folder = folder_of(torchrun)
        self._listener = socket.socket(socket.AF_UNIX)
        # Remove the socket of an earlier start that was killed.
        (folder / _RANK_0).unlink(missing_ok=True)
        with address_of(folder) as address:
            self._listener.bind(address)
        self._listener.listen(self.world)
        self._connections: dict[int, tuple[socket.socket, int]] = {}
        weakref.finalize(self, remove_own, folder, os.getpid())
        # Copies that a fork holds open would hide the end of rank 0 from the other ranks.
        close = weakref.WeakMethod(self._close)

        def close_copies() -> None:
            if (found := close()) is not None:
                found()

        os.register_at_fork(after_in_child=close_copies)

    def join(self, job: Job) -> JoinedRank:
        """Send a rank its job, once all ranks are connected. Raises ValueError if one does not connect."""
        self._wait()
        return JoinedRank(*self._connections[job.rank], job)

    def dismiss(self) -> None:
        """Let all ranks connect before this process ends: a rank that has not would wait for it."""
        with suppress(ValueError, OSError):
            self._wait()

    def _close(self) -> None:
        self._listener.close()
        for connection, _ in self._connections.values():
            connection.close()

    def _wait(self) -> None:
        until = time.monotonic() + RENDEZVOUS_S
        while len(self._connections) < self.world - 1:
            self._listener.settimeout(max(until - time.monotonic(), _PAUSE_S))
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                missing = sorted({*range(1, self.world)} - self._connections.keys())
                rule = f"all create the engine within {RENDEZVOUS_S:.0f} s"
                remedy = "let every process run the same script"
                raise fail("ranks", rule, f"none from {missing}", remedy) from None
            connection.settimeout(RENDEZVOUS_S)
            hello = json.loads(connection.recv(256))
            self._connections[hello["rank"]] = connection, hello["process"]


class JoinedRank:
    """The process of a rank that torchrun has started, with the methods of `subprocess.Popen` that are used.

    `wait` returns at the end of the job, or of the process.
    """

    def __init__(self, connection: socket.socket, pid: int, job: Job) -> None:
        self.pid = pid
        self.stdin = None
        self.returncode: int | None = None
        self._connection = connection
        connection.settimeout(RENDEZVOUS_S)
        pickled = pickle.dumps(job)
        with suppress(OSError):  # The process has ended: its closed report pipe shows that.
            socket.send_fds(connection, [_HEAD.pack(len(pickled))], [job.plans, job.wake, job.report])
            connection.sendall(pickled)

    def wait(self, timeout: float | None = None) -> int:
        """Wait as `Popen.wait`; return 0 for a job that ran to its end, 1 for a process that has ended."""
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                answer = self._connection.recv(1)
            except TimeoutError:
                raise subprocess.TimeoutExpired("rank", timeout or 0.0) from None
            except OSError:
                answer = b""
            self.returncode = 0 if answer == _DONE else 1
        return self.returncode

    def kill(self) -> None:
        """End the process: close the connection, then kill it if it does not end within _END_S seconds."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
        try:
            while not self.wait(_END_S):
                self.returncode = None
        except subprocess.TimeoutExpired:
            # The process still holds the other end, so no other process has its number.
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def follow(torchrun: Torchrun, run_job: Callable[[Any], int]) -> None:
    """Run rank 0's jobs one after the other, in a process of another rank, and end with rank 0.

    run_job: returns 0 for a job that ran to its end. Raises ValueError if rank 0 does not come; else it does
    not return.
    """
    connection = _connect(torchrun)
    if threading.current_thread() is threading.main_thread():
        # torchrun sends both to all processes; rank 0 handles them.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    hello = {"rank": torchrun.rank, "process": os.getpid()}
    with suppress(OSError):  # Rank 0 has ended.
        connection.sendall(json.dumps(hello).encode())
    jobs: SimpleQueue[tuple[Any, Sequence[int]]] = SimpleQueue()
    ends = threading.Thread(target=_receive, args=(connection, jobs, folder_of(torchrun)), daemon=True)
    ends.start()
    while True:
        job, files = jobs.get()
        code = run_job(job)
        for file in files:
            os.close(file)
        if code:
            # Rank 0 knows the cause, or finds it, and must report it before torchrun ends all processes.
            ends.join()
        connection.sendall(_DONE)


def _connect(torchrun: Torchrun) -> socket.socket:
    until = time.monotonic() + RENDEZVOUS_S
    while time.monotonic() < until:
        connection = socket.socket(socket.AF_UNIX)
        try:
            with address_of(folder_of(torchrun)) as address:
                connection.connect(address)
            return connection
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            time.sleep(_PAUSE_S)
    rule, remedy = f"create an engine within {RENDEZVOUS_S:.0f} s", "let every process run the same script"
    raise fail("rank 0", rule, "none", remedy)


def _receive(connection: socket.socket, jobs: SimpleQueue[Any], folder: Path) -> None:
    """Receive rank 0's jobs; end this process when rank 0 ends."""
    folders = [folder]
    with suppress(OSError):
        while True:
            head = socket.recv_fds(connection, _HEAD.size, 3)
            received, files, *_ = head
            size = _HEAD.unpack(received + _take(connection, _HEAD.size - len(received)))[0]
            job = pickle.loads(_take(connection, size))
            plans, wake, report = files
            folders[1:] = [job.folder]
            jobs.put((dataclasses.replace(job, plans=plans, wake=wake, report=report), files))
    # Rank 0 removes the folders unless it was killed.
    for each in folders:
        shutil.rmtree(each, ignore_errors=True)
    with suppress(Exception):
        sys.stdout.flush()
    os._exit(0)


def _take(connection: socket.socket, size: int) -> bytes:
    taken = b""
    while len(taken) < size:
        received = connection.recv(size - len(taken))
        if not received:
            raise ConnectionError
        taken += received
    return taken
