"""What an engine does to its weights between two steps: replace them, and give their memory back."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, TypeAlias

from compiled_mtp.errors import check, quote
from compiled_mtp.plan import StepPlan
from compiled_mtp.runner.runner import Runner
from compiled_mtp.runner.weight_updates import WeightSource
from compiled_mtp.scheduler import Scheduler
from compiled_mtp.scheduler.resources import ScheduledRequest
from compiled_mtp.scheduler.turn import Turn

Running: TypeAlias = Literal["finish", "abort"]
"""What happens to requests that have begun: they are decoded to their ends, or end with "abort"."""

_REPLACED = "the engine's weights were replaced before it finished; send it again"


class WeightControl:
    """The part of an engine that changes its weights; the other attributes are the engine's."""

    runner: Runner
    scheduler: Scheduler
    _turn: Turn
    _interruption: str | None
    # Why no request can be served, None while the weights are whole.
    _unavailable: str | None = None

    def _tidy(self) -> None:
        raise NotImplementedError

    def _check_open(self) -> None:
        raise NotImplementedError

    def _step_once(self) -> StepPlan | None:
        raise NotImplementedError

    def update_weights(self, source: WeightSource, *, running: Running = "finish") -> None:
        """Replace the weights in place, between two steps; requests that follow get the new ones.

        source: a checkpoint's directory or GGUF file, stored as the engine's was; or a pair of a manifest
        {name: (shape, dtype)} and an iterable of (name, tensor), in the manifest's order, for a checkpoint
        that is plain or FP8 in blocks. Requests that have begun are decoded to their ends with the old
        weights, or with `running` "abort" end with that reason and an error that says so; the next `step`
        returns their outputs. Requests that wait without a token get the new weights. Cached prefixes are
        dropped. All ranks update together, from a directory. Raises ValueError before anything changes for
        weights that do not fit, and while another thread steps. Any later exception leaves an engine that
        refuses requests until an update succeeds.
        """
        check(running in ("finish", "abort"), "running", "be finish or abort", quote(running), "choose one")
        if not self._turn.take():
            raise not_alone()
        try:
            self._tidy()
            self._check_open()
            update = self.runner.check_update(source)
            held = self.scheduler.hold_new()
            try:
                self._settle(held, running)
                self.runner.drop_launches()
                self.scheduler.drop_prefixes()
                self._unavailable = "an update of its weights has failed; call update_weights again"
                self.runner.replace_weights(update)
                self._unavailable = None
            finally:
                # Without weights the next step ends them.
                self.scheduler.release_new(held)
        finally:
            self._turn.leave()

    def _settle(self, held: Collection[ScheduledRequest], running: Running) -> None:
        """Decode, or end, every request that is not `held`, and read every launch."""
        if running == "abort":
            self.scheduler.end_begun(held, _REPLACED)
        while not self.scheduler.is_idle(held):
            self._step_once()

    def _check_weights(self) -> None:
        """Raise ValueError while the weights are of no use."""
        if self._unavailable is not None:
            raise ValueError(f"engine must have its weights, got one without: {self._unavailable}")


def not_alone() -> ValueError:
    """The error of a second thread that steps."""
    return ValueError(
        "engine must be stepped, asked to generate and closed by one thread at a time, got a second one; let "
        "one thread step, any other may call add_request and abort"
    )
