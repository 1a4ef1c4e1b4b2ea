"""Rank 0's side of the other ranks' processes: starts, watches and ends them.

A listening thread finds what goes wrong with any of them, keeps it as the one `Fault`, and ends all of them.
A collective in which rank 0 waits then fails at once, and no process or file remains.
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
from compiled_mtp.parallel.plans import PlanWriter
from compiled_mtp.parallel.running_clock import RunningClock
from compiled_mtp.parallel.torchrun import JoinedRank, rendezvous_of
from compiled_mtp.runner.assemble import Fill
from compiled_mtp.runner.numeric_settings import NumericSettings
from compiled_mtp.runner.spec import EngineSpec

logger = logging.getLogger(__name__)

# The program of a rank's process. It sets sys.path and does not use `-m`, so that it finds the package where
# this one is. It reads the parent's number first: rank 0 may end while the process imports torch.
_CODE = (
    f"import os, sys; parent = os.getppid(); sys.path.insert(0, {str(Path(__file__).parents[2])!r}); "
    "from compiled_mtp.parallel.follower import main; main(parent)"
)
# A rank sends a heartbeat every HEARTBEAT_S seconds and is lost after SILENCE_S seconds without one. Time
# counts only while this process runs and could hear it (RunningClock), and silence only once the rank is
# ready: before that it may read or compile for minutes in one call.
HEARTBEAT_S = 1.0
SILENCE_S = 5.0
# For a process to start Python and import torch.
_HELLO_S = 120.0
_POLL_S = 0.2
# For processes to end by themselves, and for the listener to find the cause of a failed collective.
_END_S = 2.0
_CAUSE_S = 2.0
# For a device to finish a step. Longer than STEP_S: symmetric kernels end by themselves before and name the
# missing rank. NCCL's never end by themselves.
DEVICE_S = STEP_S + 2.0


class RankError(ChildProcessError):
    """A rank was lost, which ends the engine; the message names the rank and the cause."""


@dataclass(frozen=True)
class RankJob:
    """What the process of a rank builds and runs. plans, wake, report: descriptors that it inherits."""

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
    """The cause of the ranks' end. is_refusal: a rank refused the caller's input with a ValueError."""

    rank: int
    text: str
    is_refusal: bool = False

    def error(self, world: int) -> Exception:
        """Return the exception to raise."""
        if self.is_refusal:
            return ValueError(f"rank {self.rank}: {self.text}")
        remedy = "create the engine again"
        return RankError(
            f"tensor_parallel={world} must keep its ranks, got rank {self.rank}: {self.text}; {remedy}"
        )


class Ranks:
    """The processes of ranks 1 .. world - 1 of an engine with `spec.config.tensor_parallel` ranks.

    They end by `end`, with this object, or with this process.
    """

    def __init__(self, spec: EngineSpec, save_to: Path | None, fill: Fill | None = None) -> None:
        self.world = spec.config.tensor_parallel
        self._communicator_kind, self._device_type = spec.config.communicator, spec.device.type
        self._processes = _Processes(self.world)
        self._end = weakref.finalize(self, self._processes.end)
        try:
            self._processes.start(spec, save_to, fill)
        except BaseException:
            self._end()
            raise

    def connect(self, own: Mapping[str, str]) -> Communicator:
        """Wait for the ranks, check that their fingerprints equal `own`, and return the communicator.

        Raises RankError for a rank that does not start or differs.
        """
        processes = self._processes
        self._wait_for(processes.hellos, _HELLO_S, "did not start")
        for rank, hello in sorted(processes.hellos.items()):
            for name, value in own.items():
                if hello.get(name) != value:
                    text = f"its {name} must be rank 0's, {value}, got {hello.get(name)}"
                    processes.abort(Fault(rank, text))
        self.check()
        communicator = join(self._communicator_kind, 0, self.world, processes.folder, self._device_type)
        processes.communicator = communicator
        return communicator

    def wait_until_ready(self) -> None:
        """Wait until every rank is ready to run plans."""
        self._wait_for(self._processes.ready, _HELLO_S, "did not become ready")

    def _wait_for(self, said: Mapping[int, Any], seconds: float, what: str) -> None:
        clock = RunningClock()
        while len(said) < self.world - 1:
            self.check()
            if clock.read() > seconds:
                rank = next(rank for rank in range(1, self.world) if rank not in said)
                self._processes.abort(Fault(rank, f"it {what} within {seconds:.0f} s"))
            time.sleep(0.01)

    @property
    def is_whole(self) -> bool:
        """Whether no rank is lost and this process may send messages to the ranks."""
        return self._end.alive and self._processes.fault is None and self._processes.is_own

    def check(self) -> None:
        """Raise the fault that ended the ranks, if there is one. Raises ValueError in a fork of rank 0."""
        if not self._processes.is_own:
            rule, remedy = "be used in the process that created it", "create another one there"
            raise fail("engine", rule, "a fork of that process", remedy)
        if self._processes.fault is not None:
            raise self._processes.fault.error(self.world)

    @contextmanager
    def limited_wait(self, launched: int) -> Iterator[None]:
        """Limit rank 0's wait for its device in the block to DEVICE_S seconds.

        Then the listener ends the ranks and aborts the communicator, which ends the wait. launched: plans
        that rank 0 has launched.
        """
        before = self._processes.device_wait
        self._processes.device_wait = (self._processes.clock.seconds, launched)
        try:
            yield
        finally:
            self._processes.device_wait = before

    def send(self, *message: Any) -> None:
        """Send every rank `message`: a name and its arguments. Raises as `check` does."""
        self.check()
        self._send(message)

    def _send(self, message: tuple[Any, ...]) -> None:
        """Write a message; abort the ranks if one does not read it within STEP_S seconds."""
        plans, clock = self._processes.plans, RunningClock()

        def check() -> None:
            if clock.read() > STEP_S:
                text = f"it did not read a message within {STEP_S:.0f} s"
                self._processes.abort(Fault(plans.slowest, text))
            self.check()

        plans.send(message, check)

    def fail(self, error: str, count: int = 0) -> Fault:
        """End the ranks because rank 0 has left a step with `error`; return the cause.

        The cause of a CommunicatorError is another rank, which the listener may find a little later: a rank
        that ended, or one that entered fewer collectives than rank 0's `count`.
        """
        fault, processes = Fault(0, error), self._processes
        if error.startswith(CommunicatorError.__name__):
            clock = RunningClock()
            while processes.fault is None and clock.read() < _CAUSE_S:
                time.sleep(0.02)
            fault = processes.find_late_rank(count) or fault
        fault = processes.abort(fault)
        self._end()
        return fault

    def end(self) -> None:
        """Tell the ranks to end, and kill those that do not."""
        try:
            if self.is_whole:
                with suppress(RankError, ValueError):
                    self._processes.is_closing = True
                    self._send(("close",))
                    self._processes.wait(_END_S)
        finally:
            self._end()


class _Processes:
    """The state of the listening thread, which must not keep `Ranks` alive."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.fault: Fault | None = None
        self.hellos: dict[int, dict[str, str]] = {}
        self.ready: dict[int, bool] = {}
        # How many collectives each rank has entered.
        self.counts: dict[int, int] = {}
        # How many plans each rank has launched.
        self.launched: dict[int, int] = {}
        # The listening thread's clock.
        self.clock = RunningClock()
        # While rank 0 waits for its device: the clock when the wait began, and how many plans it launched.
        self.device_wait: tuple[float, int] | None = None
        # The clock when rank 0 entered its current collective, and that collective's count.
        self._collective: tuple[float, int] = (0.0, -1)
        self.is_closing = False
        # None until `connect`.
        self.communicator: Communicator | None = None
        self.plans = PlanWriter(world)
        # Only `end` removes it: a TemporaryDirectory would remove itself in a fork of this process too.
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
            job = RankJob(
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
                # torchrun has started its ranks' processes.
                has_process = torchrun.has_others
                process = rendezvous_of(torchrun).join(job) if has_process else self._start_process(job)
            finally:
                os.close(report)
            self._by_rank[rank], self._heard[rank], self._unread[rank] = process, self.clock.seconds, b""
        self._listener = threading.Thread(target=self._listen, name="compiled-mtp ranks", daemon=True)
        self._listener.start()

    def _start_process(self, job: RankJob) -> subprocess.Popen[bytes]:
        with (self.folder / f"errors_{job.rank}").open("wb") as errors:
            process = subprocess.Popen(
                # -P: do not import modules from the user's current folder.
                [sys.executable, "-P", "-c", _CODE],
                stdin=subprocess.PIPE,
                stdout=errors,
                stderr=errors,
                pass_fds=(job.plans, job.wake, job.report),
                # Only rank 0 handles Ctrl-C.
                start_new_session=True,
            )
        assert process.stdin is not None
        with suppress(OSError):  # The process has ended: the listener finds the cause.
            process.stdin.write(pickle.dumps(job))
            process.stdin.flush()
        return process

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, report in self._reports.items():
                selector.register(report, selectors.EVENT_READ, rank)
            while not self._is_ended.is_set() and self.fault is None:
                # Read the clock first: after a pause, reports that came meanwhile are heard before any check.
                now = self.clock.read()
                for key, _ in selector.select(_POLL_S):
                    self._hear(key.data)
                for rank in self.ready:
                    if now - self._heard[rank] > SILENCE_S and not self.is_closing:
                        process = self._by_rank[rank].pid
                        self.abort(Fault(rank, f"process {process} sent no heartbeat for {SILENCE_S:.0f} s"))
                self._limit_collective(now)
                self._limit_device_wait(now)

    def find_late_rank(self, count: int) -> Fault | None:
        """Return the fault of the rank that entered the fewest collectives, None if those are `count`."""
        rank = min(self.counts, key=lambda rank: self.counts[rank], default=0)
        if not rank or self.counts[rank] >= count:
            return None
        return Fault(rank, f"it did not enter a collective within {STEP_S:.0f} s")

    def _limit_collective(self, now: float) -> None:
        communicator = self.communicator
        if communicator is None or not (communicator.has_steps and communicator.is_waiting):
            self._collective = (now, -1)
        elif communicator.count != self._collective[1]:
            self._collective = (now, communicator.count)
        elif now - self._collective[0] > STEP_S:
            text = f"a collective did not end within {STEP_S:.0f} s, though every rank has entered it"
            self.abort(self.find_late_rank(communicator.count) or Fault(0, text))

    def _limit_device_wait(self, now: float) -> None:
        wait = self.device_wait
        if wait is None or now - wait[0] < min(STEP_S, DEVICE_S):
            return
        if self.communicator is not None:
            # A waiting kernel knows which rank is missing.
            self.communicator.name_missing()
        if now - wait[0] < DEVICE_S:
            return
        # The last reports are recent enough: since then the ranks have only waited for the device.
        late = min(self.launched, key=lambda rank: self.launched[rank], default=0)
        own, theirs = wait[1], self.launched.get(late, 0)
        if late and theirs < own:
            text = f"it did not enter a collective within {DEVICE_S:.0f} s: it has launched {theirs} of {own}"
            self.abort(Fault(late, f"{text} plans"))
        else:
            text = f"its device was not done within {DEVICE_S:.0f} s, though every rank has launched the plan"
            self.abort(Fault(0, text))

    def _hear(self, rank: int) -> None:
        """Read a rank's reports, lines of JSON; an empty read means that the rank has closed its pipe."""
        received = os.read(self._reports[rank], 1 << 16)
        if not received:
            if self.is_closing:
                self._is_ended.set()
            else:
                self.abort(Fault(rank, self._end_of(rank)))
            return
        self._heard[rank] = self.clock.seconds
        *lines, self._unread[rank] = (self._unread[rank] + received).split(b"\n")
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
                    self.abort(Fault(rank, report["text"], report["is_refusal"]))

    def _end_of(self, rank: int) -> str:
        """Return how the process of a rank has ended."""
        process = self._by_rank[rank]
        try:
            code = process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return f"process {process.pid} closed its report"
        if isinstance(process, JoinedRank):
            return f"process {process.pid} ended, see torchrun's output"
        if code < 0:
            because = " (memory may have run out)" if -code == signal.SIGKILL else ""
            return f"process {process.pid} was ended by {signal.Signals(-code).name}{because}"
        with suppress(OSError):
            lines = (self.folder / f"errors_{rank}").read_text(errors="replace").split("\n")
            last = next((line for line in reversed(lines) if line.strip()), "")
            return f"process {process.pid} ended with code {code}, {escape(last, 400)!r}"
        return f"process {process.pid} ended with code {code}"

    def abort(self, fault: Fault) -> Fault:
        """Kill every process and abort the communicator; return the first fault, which is the cause."""
        with self._lock:
            if self.fault is None:
                self.fault = fault
                logger.error("%s", fault.error(self.world))
        for process in self._by_rank.values():
            _kill(process)
        if self.communicator is not None:
            self.communicator.abort()
        return self.fault

    def wait(self, seconds: float) -> None:
        """Wait until all processes have ended, for at most `seconds`."""
        until = time.monotonic() + seconds
        for process in self._by_rank.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(until - time.monotonic(), 0))

    @property
    def is_own(self) -> bool:
        """Whether this process, and not its parent before a fork, started the ranks."""
        return os.getpid() == self._owner

    def end(self) -> None:
        """Kill the processes and release files and memory. In a fork of this process it does nothing."""
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
    """Kill a process and those that it has started."""
    if process.returncode is not None:
        return
    if isinstance(process, JoinedRank):
        process.kill()
        return
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
