"""Rank 0's runner: every rank runs what it runs."""

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
from compiled_mtp.runner.weight_updates import WeightUpdate

# A plan is sent as its fields: pickling it takes ten times as long.
_FIELDS = attrgetter(*(field.name for field in fields(StepPlan)))


class _LaunchError(RuntimeError):
    """A launch on this rank failed; its result has the error."""


class LeadRunner(Runner):
    """The `Runner` of rank 0 of `spec.config.tensor_parallel` ranks; it returns rank 0's results.

    A lost rank ends the engine: every later call raises RankError with the rank and the cause. So does a
    failed launch or an uncaught exception on any rank, since the ranks are then out of step. The first Ctrl-C
    takes effect at the end of the launch, a second one at once.
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

        def check_and_report(what: str, done: int, total: int) -> None:
            self._ranks.check()
            if progress is not None:
                progress(what, done, total)

        try:
            own = fingerprint(spec.config.model, spec.config.lora, has_files=fill is None)
            communicator = self._ranks.connect(own)
            super().__init__(spec.of_rank(communicator), check_and_report, fill, save_to=save_to)
            self._ranks.wait_until_ready()
        except (ValueError, KeyboardInterrupt):
            self._ranks.end()
            raise
        except BaseException as error:
            fault = self._ranks.fail(f"{type(error).__name__}: {error}")
            raise fault.error(spec.config.tensor_parallel) from error
        self._communicator = communicator
        # The torch settings last sent to every rank.
        self._settings: NumericSettings | None = None
        communicator.expect_steps()

    def run(self, plan: StepPlan | None) -> StepResult | None:
        """Run `Runner.run` on every rank. Raises RankError if a rank is lost."""
        with _delayed_interrupts(), self._in_step():
            if plan is not None:
                self._send_settings()
                self._ranks.send("run", *_FIELDS(plan))
            result = super().run(plan)
            # A collective on the device that was aborted may have ended without an error.
            self._ranks.check()
            self._communicator.check()
            if result is not None and result.error is not None:
                raise _LaunchError(result.error)
        return result

    def set_masks(self, plan: StepPlan, masks: torch.Tensor) -> None:
        """Run `Runner.set_masks` on every rank."""
        super().set_masks(plan, masks)
        with _delayed_interrupts(), self._in_step():
            # As NumPy: a tensor's pickle includes all the memory of which the tensor is a view.
            self._ranks.send("set_masks", masks.numpy(), *_FIELDS(plan))

    def drop_launches(self) -> None:
        """Run `Runner.drop_launches` on every rank, or on rank 0 alone if a rank is lost."""
        with self._ranks.limited_wait(self.num_launched):
            super().drop_launches()
        if self._ranks.is_whole:
            with _delayed_interrupts(), self._in_step():
                self._ranks.send("drop_launches")

    def replace_weights(self, update: WeightUpdate) -> None:
        """Run `Runner.replace_weights` on every rank; each reads its own shards from the files."""
        assert update.path is not None, "several ranks take their weights from files"
        with _delayed_interrupts(), self._in_step():
            self._ranks.send("replace_from", update.path.absolute())
            super().replace_weights(update)

    def sleep(self) -> None:
        """Run `Runner.sleep` on every rank."""
        with _delayed_interrupts(), self._in_step():
            self._ranks.send("sleep")
            super().sleep()

    def wake_up(self, path: Path | None) -> None:
        """Run `Runner.wake_up` on every rank. An error on any rank ends the ranks."""
        with _delayed_interrupts(), self._in_step():
            self._ranks.send("wake_up", None if path is None else path.absolute())
            super().wake_up(path)

    def check(self) -> None:
        """Raise RankError once a rank is lost."""
        self._ranks.check()

    def close(self) -> None:
        """Run `Runner.close`, and end the ranks."""
        with self._ranks.limited_wait(self.num_launched):
            super().close()
        self._drop_graphs()
        self._ranks.end()

    def _drop_graphs(self) -> None:
        """Free the captured graphs for which the communicator's `abort` waits."""
        if self._communicator.waits_for_graphs and not self.is_asleep:
            self.programs.drop()

    def _send_settings(self) -> None:
        """Send this process' torch settings to every rank if they have changed."""
        settings = NumericSettings.read()
        if settings != self._settings:
            self._ranks.send("settings", settings)
            self._settings = settings

    def _finish(self, *launch: Any) -> StepResult:
        with self._ranks.limited_wait(self.num_launched):
            return super()._finish(*launch)

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """Run what all ranks must complete alike: an exception that leaves the block ends the ranks."""
        self._ranks.check()
        try:
            yield
        except BaseException as error:
            cause = str(error) if isinstance(error, _LaunchError) else f"{type(error).__name__}: {error}"
            fault = self._ranks.fail(cause, self._communicator.count)
            self._drop_graphs()
            if not isinstance(error, Exception):
                raise
            raise fault.error(self._ranks.world) from error


@contextmanager
def _delayed_interrupts() -> Iterator[None]:
    """Handle the first Ctrl-C at the end of the block, and a second one at once; only in the main thread."""
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
