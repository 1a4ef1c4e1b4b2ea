"""A process beside the engine that compiles programs: what it costs the engine is memory and idle time."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

# Before anything else is imported. A compiler that is killed leaves its own temporary files: in the folder.
# What Python keeps between runs stays where it was, since Python asks for its place once.
_BEGIN = "import os, sys, tempfile; os.nice(19); tempfile.gettempdir(); os.environ['TMPDIR'] = sys.argv[1]; "
# How often a process looks whether its parent lives.
_LOOK_S = 1.0
_REMEDY = "give a graph_cache made with `compiled-mtp export --mtp-step auto`, or free memory and start again"


class ProgramMaker:
    """Runs `code` in a Python process of the lowest priority, with a folder as its argument.

    It reads `order` from stdin, writes files into the folder, and names each on a line of stdout once it is
    whole; `end_with_parent` ends it when this process ends. The folder is new and private, and lasts until
    `close`. `check(folder)` raises ValueError if what is made there does not fit.
    """

    def __init__(self, code: str, order: bytes, check: Callable[[Path], None]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="compiled_mtp_depths_"))
        self._remove = weakref.finalize(self, remove_own, self.folder, os.getpid())
        self._code, self._order, self._check = code, order, check
        self._process: subprocess.Popen[bytes] | None = None
        self._made: set[str] = set()
        self._lock = threading.Lock()
        self._is_closed = False

    def start(self) -> None:
        """Start the process, unless `close` came first. Raises ValueError if that cannot be done."""
        with self._lock:
            if self._is_closed:
                return
            try:
                self._process = self._spawn()
            except OSError as error:
                raise ValueError(f"the process that compiles must start, got {error}; {_REMEDY}") from None
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):  # It has ended, or was closed meanwhile.
            self._process.stdin.write(self._order)
            self._process.stdin.flush()

    def _spawn(self) -> subprocess.Popen[bytes]:
        with (self.folder / "errors").open("wb") as errors:
            return subprocess.Popen(
                # -P: what lies in the user's folder is nothing to import.
                [sys.executable, "-P", "-c", _BEGIN + self._code, str(self.folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                # In a group with the compilers that it calls. Ctrl-C is not for them.
                start_new_session=True,
            )

    def wait_for(self, name: str) -> None:
        """Wait until the file of that name is whole. Raises ValueError if the process ends before, or was
        never started."""
        while name not in self._made:
            line = b""
            if self._process is not None:
                assert self._process.stdout is not None
                line = self._process.stdout.readline()
            if not line:
                raise ValueError(f"the process that compiles must go on, got {self._cause()}; {_REMEDY}")
            if not self._made:
                self._check(self.folder)
            self._made.add(line.decode().strip())

    def close(self) -> None:
        """End the process and what it has started, and remove the folder."""
        with self._lock:
            self._is_closed = True
            if self._process is not None and self._process.returncode is None:
                self._kill(self._process)
        self._remove()

    def _cause(self) -> str:
        """How the process has ended."""
        with self._lock:
            if self._process is None:
                return "none"
            if self._process.returncode is None:
                # Its number is not given to another before it is asked how it ended.
                os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
                self._kill(self._process)
            code = self._process.returncode
        if code < 0:
            because = " (memory may have run out)" if -code == signal.SIGKILL else ""
            return f"its end by {signal.Signals(-code).name}{because}"
        with suppress(OSError):
            lines = (self.folder / "errors").read_text(errors="replace").split("\n")
            return f"its end with {next((one for one in reversed(lines) if one.strip()), f'code {code}')!r}"
        return f"its end with code {code}"

    @staticmethod
    def _kill(process: subprocess.Popen[bytes]) -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            with suppress(BrokenPipeError):
                stream.close()


def end_with_parent(folder: Path) -> None:
    """In the process: end it and all that it has started, and remove the folder, once its parent ends."""
    parent = os.getppid()

    def watch() -> None:
        wait_for_parent_end(parent)
        shutil.rmtree(folder, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def wait_for_parent_end(parent: int) -> None:
    """Return once the process `parent`, at the other end of stdin, has closed it or ended.

    A fork of it may hold the other end for longer, so its number is asked for too.
    """
    while os.getppid() == parent:
        # Not by `sys.stdin`: a thread that reads from that holds a lock, for want of which the interpreter
        # aborts at an end of its own.
        if select.select([0], [], [], _LOOK_S)[0] and not os.read(0, 1 << 16):
            return


def remove_own(folder: Path, owner: int) -> None:
    """Remove a folder in the process `owner`, which made it, and not in a fork that ends before."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
