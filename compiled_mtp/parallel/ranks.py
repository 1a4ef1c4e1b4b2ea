"""Starts the processes of the other ranks, watches them, and ends them: rank 0's side.

Whatever goes wrong with one of them is found by a thread that listens to all, kept as the one `Fault`, and
ends them all: the exchange that rank 0 may be waiting in then fails at once, and nothing is left behind.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compiled_mtp.communicators.choose import join
from compiled_mtp.communicators.communicator import Communicator, CommunicatorError
from compiled_mtp.communicators.gloo import STEP_S
from compiled_mtp.config import EngineConfig, Torchrun
from compiled_mtp.errors import escape, fail
from compiled_mtp.model_config import ModelConfig
from compiled_mtp.parallel.patience import RunningClock
from compiled_mtp.parallel.plans import PlanWriter
from compiled_mtp.parallel.torchrun import JoinedRank, meeting_of
from compiled_mtp.runner.assemble import Fill
from compiled_mtp.runner.numeric_settings import NumericSettings
from compiled_mtp.runner.spec import EngineSpec

logger = logging.getLogger(__name__)

# The process of a rank. Not `-m`: the package is found wherever this one came from. The parent is asked for
# first: rank 0 may end while torch is imported.
_CODE = (
    f"import os, sys; parent = os.getppid(); sys.path.insert(0, {str(Path(__file__).parents[2])!r}); "
    "from compiled_mtp.parallel.follower import main; main(parent)"
)
# A rank says that it is alive every so often, and is given up when nothing was heard for so long. Seconds of
# others count while this process runs and could hear them (RunningClock). The
# second counts once it is ready: until then it may be reading, or compiling, for minutes in one call.
ALIVE_S = 1.0
SILENCE_S = 5.0
# Until Python has imported torch.
_HELLO_S = 120.0
_POLL_S = 0.2
# For processes to end by themselves, and for a fault to be found behind an exchange that failed.
_END_S = 2.0
_CAUSE_S = 2.0
# For a device to finish a step. Its kernels should have given up before, and know more; NCCL's never do.
DEVICE_S = STEP_S + 2.0


class RankError(ChildProcessError):
    """A rank is lost, and with it the engine; says which rank and why."""


@dataclass(frozen=True)
class RankOrder:
    """What the process of a rank is to build and to follow; its file descriptors are inherited."""

    rank: int
    world: int
    folder: Path
    config: EngineConfig
    model: ModelConfig
    num_valid_ids: int
    save_to: Path | None
    device_type: str
    fill: Fill | None
    settings: NumericSettings
    plans: int
    wake: int
    report: int


@dataclass(frozen=True)
class Fault:
    """What ended the ranks. is_refusal: a rank refused what the caller asked for, by a ValueError."""

    rank: int
    text: str
    is_refusal: bool = False

    def error(self, world: int) -> Exception:
        """The error to raise for it."""
        if self.is_refusal:
            return ValueError(f"rank {self.rank}: {self.text}")
        remedy = "create the engine again"
        return RankError(
            f"tensor_parallel={world} must keep its ranks, got rank {self.rank}: {self.text}; {remedy}"
        )


class Ranks:
    """The processes of ranks 1 .. world - 1 of an engine with `spec.config.tensor_parallel` ranks.

    They end with this object, with `end`, and with this process.
    """

    def __init__(self, spec: EngineSpec, save_to: Path | None, fill: Fill | None = None) -> None:
        self.world = spec.config.tensor_parallel
        self._communicator_kind, self._device_type = spec.config.exchange, spec.device.type
        self._processes = _Processes(self.world)
        self._end = weakref.finalize(self, self._processes.end)
        try:
            self._processes.start(spec, save_to, fill)
        except BaseException:
            self._end()
            raise

    def connect(self, own: Mapping[str, str]) -> Communicator:
        """Wait for the ranks, which must say what `own` says of this process, and join them."""
        processes = self._processes
        self._wait_for(processes.hellos, _HELLO_S, "did not start")
        for rank, hello in sorted(processes.hellos.items()):
            for name, value in own.items():
                if hello.get(name) != value:
                    text = f"its {name} must be rank 0's, {value}, got {hello.get(name)}"
                    processes.give_up(Fault(rank, text))
        self.check()
        communicator = join(self._communicator_kind, 0, self.world, processes.folder, self._device_type)
        processes.communicator = communicator
        return communicator

    def wait_until_ready(self) -> None:
        """Wait until every rank follows plans."""
        self._wait_for(self._processes.ready, _HELLO_S, "did not become ready")

    def _wait_for(self, said: Mapping[int, Any], seconds: float, what: str) -> None:
        clock = RunningClock()
        while len(said) < self.world - 1:
            self.check()
            if clock.look() > seconds:
                rank = next(rank for rank in range(1, self.world) if rank not in said)
                self._processes.give_up(Fault(rank, f"it {what} within {seconds:.0f} s"))
            time.sleep(0.01)

    @property
    def is_whole(self) -> bool:
        """Whether every rank still does what it is told, by this process."""
        return self._end.alive and self._processes.fault is None and self._processes.is_own

    def check(self) -> None:
        """Raise what has ended the ranks, if anything has; ValueError in a fork of their process."""
        if not self._processes.is_own:
            rule, remedy = "be used in the process that created it", "create another one there"
            raise fail("engine", rule, "a fork of that process", remedy)
        if self._processes.fault is not None:
            raise self._processes.fault.error(self.world)

    @contextmanager
    def limited(self, launched: int) -> Iterator[None]:
        """Within it rank 0 waits for its device, with so many plans launched: for DEVICE_S, then the ranks
        are ended, and the exchange given up, which ends the wait."""
        before, self._processes.waits = self._processes.waits, (self._processes.clock.seconds, launched)
        try:
            yield
        finally:
            self._processes.waits = before

    def send(self, *message: Any) -> None:
        """Let every rank do what `message` says: a name and its arguments. Raises as `check` does."""
        self.check()
        self._send(message)

    def _send(self, message: tuple[Any, ...]) -> None:
        """Write a message; a rank that does not read it within STEP_S is given up."""
        plans, clock = self._processes.plans, RunningClock()

        def check() -> None:
            if clock.look() > STEP_S:
                text = f"it did not read a message within {STEP_S:.0f} s"
                self._processes.give_up(Fault(plans.slowest, text))
            self.check()

        plans.send(message, check)

    def lose(self, error: str, count: int = 0) -> Fault:
        """End the ranks since rank 0 has left a step with `error`; returns the cause.

        Where that is an CommunicatorError, the cause lies elsewhere and may be found a little later: a
        rank's end, or one that has come to exchanges less often than this one, which has `count` times.
        """
        fault, processes = Fault(0, error), self._processes
        if error.startswith(CommunicatorError.__name__):
            clock = RunningClock()
            while processes.fault is None and clock.look() < _CAUSE_S:
                time.sleep(0.02)
            fault = processes.missing(count) or fault
        fault = processes.give_up(fault)
        self._end()
        return fault

    def end(self) -> None:
        """Let the ranks end by themselves, and end those that do not."""
        try:
            if self.is_whole:
                with suppress(RankError, ValueError):
                    self._processes.is_closing = True
                    self._send(("close",))
                    self._processes.wait(_END_S)
        finally:
            self._end()


class _Processes:
    """What the thread that listens knows; it must not keep `Ranks` alive."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.fault: Fault | None = None
        self.hellos: dict[int, dict[str, str]] = {}
        self.ready: dict[int, bool] = {}
        # How often a rank has come to exchanges.
        self.counts: dict[int, int] = {}
        # How many plans it has launched.
        self.launched: dict[int, int] = {}
        # What the thread that listens goes by.
        self.clock = RunningClock()
        # Since when by it rank 0 waits for its device, and how many plans it has launched itself.
        self.waits: tuple[float, int] | None = None
        # Since when by it rank 0 is at the exchange of this count.
        self._comes: tuple[float, int] = (0.0, -1)
        self.is_closing = False
        # Once there is one.
        self.communicator: Communicator | None = None
        self.plans = PlanWriter(world)
        # Removed by `end` alone: a TemporaryDirectory removes itself in a fork of this process too.
        self.folder = Path(tempfile.mkdtemp(prefix="compiled_mtp_ranks_"))
        self._by_rank: dict[int, subprocess.Popen[bytes] | JoinedRank] = {}
        self._heard: dict[int, float] = {}
        self._reports: dict[int, int] = {}
        self._unread: dict[int, bytes] = {}
        self._lock = threading.Lock()
        self._is_ended = threading.Event()
        self._listener: threading.Thread | None = None
        self._owner = os.getpid()

    def start(self, spec: EngineSpec, save_to: Path | None, fill: Fill | None) -> None:
        torchrun, settings = Torchrun(), NumericSettings.read()
        for rank in range(1, self.world):
            self._reports[rank], report = os.pipe()
            wake = self.plans.pipes[rank][0]
            order = RankOrder(
                rank,
                self.world,
                self.folder,
                spec.config,
                spec.model,
                spec.num_valid_ids,
                save_to,
                spec.device.type,
                fill,
                settings,
                self.plans.file,
                wake,
                report,
            )
            try:
                # Those of torchrun are there.
                has_process = torchrun.has_others
                process = meeting_of(torchrun).join(order) if has_process else self._start_process(order)
            finally:
                os.close(report)
            self._by_rank[rank], self._heard[rank], self._unread[rank] = process, self.clock.seconds, b""
        self._listener = threading.Thread(target=self._listen, name="compiled-mtp ranks", daemon=True)
        self._listener.start()

    def _start_process(self, order: RankOrder) -> subprocess.Popen[bytes]:
        with (self.folder / f"errors_{order.rank}").open("wb") as errors:
            process = subprocess.Popen(
                # -P: what lies in the user's folder is nothing to import.
                [sys.executable, "-P", "-c", _CODE],
                stdin=subprocess.PIPE,
                stdout=errors,
                stderr=errors,
                pass_fds=(order.plans, order.wake, order.report),
                # Ctrl-C is rank 0's to see to.
                start_new_session=True,
            )
        assert process.stdin is not None
        with suppress(OSError):  # It has ended: the listener says why.
            process.stdin.write(pickle.dumps(order))
            process.stdin.flush()
        return process

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, report in self._reports.items():
                selector.register(report, selectors.EVENT_READ, rank)
            while not self._is_ended.is_set() and self.fault is None:
                # What was said in a pause is heard before anything is judged.
                now = self.clock.look()
                for key, _ in selector.select(_POLL_S):
                    self._hear(key.data)
                for rank in self.ready:
                    if now - self._heard[rank] > SILENCE_S and not self.is_closing:
                        process = self._by_rank[rank].pid
                        self.give_up(Fault(rank, f"process {process} was not heard of for {SILENCE_S:.0f} s"))
                self._limit_communicator(now)
                self._limit_wait(now)

    def missing(self, count: int) -> Fault | None:
        """The rank that has come to exchanges least often, if less than `count` times."""
        rank = min(self.counts, key=lambda rank: self.counts[rank], default=0)
        if not rank or self.counts[rank] >= count:
            return None
        return Fault(rank, f"it did not come to an exchange within {STEP_S:.0f} s")

    def _limit_communicator(self, now: float) -> None:
        communicator = self.communicator
        if communicator is None or not (communicator.has_steps and communicator.is_waiting):
            self._comes = (now, -1)
        elif communicator.count != self._comes[1]:
            self._comes = (now, communicator.count)
        elif now - self._comes[0] > STEP_S:
            text = f"an exchange was not done within {STEP_S:.0f} s, though every rank has come"
            self.give_up(self.missing(communicator.count) or Fault(0, text))

    def _limit_wait(self, now: float) -> None:
        waits = self.waits
        if waits is None or now - waits[0] < min(STEP_S, DEVICE_S):
            return
        if self.communicator is not None:
            # Its kernels know more.
            self.communicator.name_missing()
        if now - waits[0] < DEVICE_S:
            return
        # What they said a second ago, while the device waited for ever.
        behind = min(self.launched, key=lambda rank: self.launched[rank], default=0)
        own, theirs = waits[1], self.launched.get(behind, 0)
        if behind and theirs < own:
            text = (
                f"it did not come to an exchange within {DEVICE_S:.0f} s: it has launched {theirs} of {own}"
            )
            self.give_up(Fault(behind, f"{text} plans"))
        else:
            text = f"its device was not done within {DEVICE_S:.0f} s, though every rank has launched the plan"
            self.give_up(Fault(0, text))

    def _hear(self, rank: int) -> None:
        """Read what a rank reports: lines of JSON, and at its end nothing."""
        said = os.read(self._reports[rank], 1 << 16)
        if not said:
            if self.is_closing:
                self._is_ended.set()
            else:
                self.give_up(Fault(rank, self._end_of(rank)))
            return
        self._heard[rank] = self.clock.seconds
        *lines, self._unread[rank] = (self._unread[rank] + said).split(b"\n")
        for line in lines:
            report = json.loads(line)
            match report["kind"]:
                case "hello":
                    self.hellos[rank] = report["hello"]
                case "alive":
                    self.counts[rank], self.launched[rank] = report["count"], report["launched"]
                case "ready":
                    self.ready[rank] = True
                case "error":
                    self.give_up(Fault(rank, report["text"], report["is_refusal"]))

    def _end_of(self, rank: int) -> str:
        """How the process of a rank has ended."""
        process = self._by_rank[rank]
        try:
            code = process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return f"process {process.pid} closed its report"
        if isinstance(process, JoinedRank):
            return f"process {process.pid} ended, torchrun says how"
        if code < 0:
            because = " (memory may have run out)" if -code == signal.SIGKILL else ""
            return f"process {process.pid} was ended by {signal.Signals(-code).name}{because}"
        with suppress(OSError):
            lines = (self.folder / f"errors_{rank}").read_text(errors="replace").split("\n")
            last = next((line for line in reversed(lines) if line.strip()), "")
            return f"process {process.pid} ended with code {code}, {escape(last, 400)!r}"
        return f"process {process.pid} ended with code {code}"

    def give_up(self, fault: Fault) -> Fault:
        """End every process; returns the first fault, which is the one that counts."""
        with self._lock:
            if self.fault is None:
                self.fault = fault
                logger.error("%s", fault.error(self.world))
        for process in self._by_rank.values():
            _kill(process)
        if self.communicator is not None:
            self.communicator.give_up()
        return self.fault

    def wait(self, seconds: float) -> None:
        """Until all have ended, or so long."""
        until = time.monotonic() + seconds
        for process in self._by_rank.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(until - time.monotonic(), 0))

    @property
    def is_own(self) -> bool:
        """Whether this process started them; a fork of it did not."""
        return os.getpid() == self._owner

    def end(self) -> None:
        """Leave nothing behind. In a fork of this process, nothing is done."""
        if not self.is_own:
            return
        self.is_closing = True
        self._is_ended.set()
        for process in self._by_rank.values():
            _kill(process)
            process.wait()
            if process.stdin is not None:
                with suppress(OSError):
                    process.stdin.close()
        if self._listener is not None and self._listener is not threading.current_thread():
            self._listener.join()
        for report in self._reports.values():
            os.close(report)
        self.plans.close()
        if self.communicator is not None:
            self.communicator.release()
        shutil.rmtree(self.folder, ignore_errors=True)


def _kill(process: subprocess.Popen[bytes] | JoinedRank) -> None:
    """End a process and what it has started."""
    if process.returncode is not None:
        return
    if isinstance(process, JoinedRank):
        process.kill()
        return
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
