"""Rank 0's runner: what it is told, every rank does."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from compiled_mtp.parallel.follower import fingerprint
from compiled_mtp.parallel.limits import check_ranks
from compiled_mtp.parallel.ranks import Ranks
from compiled_mtp.plan import StepPlan, StepResult
from compiled_mtp.runner.assemble import Fill, Progress
from compiled_mtp.runner.numeric_settings import NumericSettings
from compiled_mtp.runner.runner import Runner
from compiled_mtp.runner.spec import EngineSpec

# A plan is sent as its fields: pickling it takes ten times as long.
_FIELDS = attrgetter(*(field.name for field in fields(StepPlan)))


class _LaunchError(RuntimeError):
    """A launch failed here, by what its result says."""


class LeadRunner(Runner):
    """A `Runner` of `spec.config.tensor_parallel` ranks, of which it is the first; results are its own.

    A rank that is lost ends the engine: from then on everything raises RankError, which names the rank and
    the cause. So does a launch that fails on any rank, and an exception that leaves one: the ranks are out of
    step then. The first Ctrl-C waits for the end of the launch, a second one does not.
    """

    def __init__(
        self,
        spec: EngineSpec,
        progress: Progress | None = None,
        fill: Fill | None = None,
        *,
        save_to: Path | None = None,
    ) -> None:
        check_ranks(spec, fill)
        self._ranks = Ranks(spec, save_to, fill)

        def told(what: str, done: int, total: int) -> None:
            self._ranks.check()
            if progress is not None:
                progress(what, done, total)

        try:
            communicator = self._ranks.connect(fingerprint(spec.config.model, has_files=fill is None))
            super().__init__(spec.of_rank(communicator), told, fill, save_to=save_to)
            self._ranks.wait_until_ready()
        except (ValueError, KeyboardInterrupt):
            self._ranks.end()
            raise
        except BaseException as error:
            fault = self._ranks.lose(f"{type(error).__name__}: {error}")
            raise fault.error(spec.config.tensor_parallel) from error
        self._communicator = communicator
        # What every rank has been told of torch's settings.
        self._settings: NumericSettings | None = None
        communicator.expect_steps()

    def run(self, plan: StepPlan | None) -> StepResult | None:
        """As `Runner.run`, on every rank. Raises RankError where one is lost."""
        with _interrupts_wait(), self._in_step():
            if plan is not None:
                self._send_settings()
                self._ranks.send("run", *_FIELDS(plan))
            result = super().run(plan)
            # An exchange on the device that was given up may have ended without a word.
            self._ranks.check()
            self._communicator.check()
            if result is not None and result.error is not None:
                raise _LaunchError(result.error)
        return result

    def set_masks(self, plan: StepPlan, masks: torch.Tensor) -> None:
        """As `Runner.set_masks`, on every rank."""
        super().set_masks(plan, masks)
        with _interrupts_wait(), self._in_step():
            # The pickle of a tensor has all the memory of which it is a view.
            self._ranks.send("set_masks", masks.numpy(), *_FIELDS(plan))

    def drop_launches(self) -> None:
        """As `Runner.drop_launches`, on every rank that is left."""
        with self._ranks.limited(self.num_launched):
            super().drop_launches()
        if self._ranks.is_whole:
            with _interrupts_wait(), self._in_step():
                self._ranks.send("drop_launches")

    def check(self) -> None:
        """As `Runner.check`: raise RankError once a rank is lost."""
        self._ranks.check()

    def close(self) -> None:
        """As `Runner.close`, and end the ranks."""
        with self._ranks.limited(self.num_launched):
            super().close()
        if self._communicator.waits_for_graphs:
            self.programs.drop()
        self._ranks.end()

    def _send_settings(self) -> None:
        """Tell every rank what this process has told torch, where that has changed."""
        settings = NumericSettings.read()
        if settings != self._settings:
            self._ranks.send("settings", settings)
            self._settings = settings

    def _finish(self, *launch: Any) -> StepResult:
        with self._ranks.limited(self.num_launched):
            return super()._finish(*launch)

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """What every rank does alike, to its end or not at all: whatever leaves it ends the ranks."""
        self._ranks.check()
        try:
            yield
        except BaseException as error:
            cause = str(error) if isinstance(error, _LaunchError) else f"{type(error).__name__}: {error}"
            fault = self._ranks.lose(cause, self._communicator.count)
            if self._communicator.waits_for_graphs:
                self.programs.drop()
            if not isinstance(error, Exception):
                raise
            raise fault.error(self._ranks.world) from error


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Keep the first Ctrl-C for the end, where it comes to this thread at all."""
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT) if is_main else None
    if not callable(before):
        yield
        return
    waiting: list[FrameType | None] = []

    def keep(number: int, frame: FrameType | None) -> None:
        if waiting:
            before(number, frame)
        waiting.append(frame)

    signal.signal(signal.SIGINT, keep)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if waiting:
        before(signal.SIGINT, waiting[0])
