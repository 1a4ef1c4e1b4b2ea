"""What an engine does to its weights between two steps: replace them, and give their memory back."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Literal, TypeAlias

from compiled_mtp.errors import EngineUnavailableError, check, quote
from compiled_mtp.request import SamplingParams
from compiled_mtp.runner.runner import Runner
from compiled_mtp.runner.step_loop import StepLoop
from compiled_mtp.runner.weight_updates import WeightSource, WeightUpdate
from compiled_mtp.scheduler import Scheduler
from compiled_mtp.scheduler.inbox import Inbox
from compiled_mtp.scheduler.scheduled_request import ScheduledRequest
from compiled_mtp.scheduler.turn import Turn

Running: TypeAlias = Literal["finish", "abort"]
"""What happens to requests that have begun: they are decoded to their ends, or end with "abort"."""

_REPLACED = "the engine's weights were replaced before it finished; send it again"
_SLEPT = "the engine was put to sleep before it finished; send it again"
_INTERRUPTED = "a change of the engine's weights was interrupted"


class WeightControl:
    """The part of an engine that changes its weights; the other attributes are the engine's."""

    runner: Runner
    scheduler: Scheduler
    _inbox: Inbox
    _is_closed: bool
    _turn: Turn
    _steps: StepLoop
    # Why no request can be served, None while the weights are whole.
    _unavailable: str | None = None
    # The directory of the last weights, None for the config's; and whether tensors came after it.
    _weights_path: Path | None = None
    _has_given_weights = False

    def _tidy(self) -> None:
        raise NotImplementedError

    def update_weights(self, source: WeightSource, *, running: Running = "finish") -> None:
        """Replace the weights in place, between two steps.

        source: a checkpoint's directory or GGUF file, stored as the engine's was; or a pair of a manifest
        {name: (shape, dtype)} and an iterable of (name, tensor), in the manifest's order, for a checkpoint
        that is plain or FP8 in blocks and an engine of one rank. running: "finish" first decodes the requests
        that have begun, with the old weights; "abort" ends them with that reason and an error that says so.
        The next `step` returns their outputs. Waiting requests get the new weights. Drops cached prefixes.
        Raises ValueError before anything changes for weights that do not fit, and while another thread steps.
        After any later exception, the engine refuses requests until an update succeeds.
        """
        check(running in ("finish", "abort"), "running", "be finish or abort", quote(running), "choose one")
        self._turn.take()
        try:
            self._tidy()
            self._check_open()
            is_awake, remedy = not self.runner.is_asleep, "give the weights to wake_up"
            check(is_awake, "engine", "be awake for an update", "one that sleeps", remedy)
            update = self.runner.check_update(source)
            self._steps.interruption = _INTERRUPTED
            held = self.scheduler.hold_new()
            try:
                self._settle(held, running, _REPLACED)
                self.runner.drop_launches()
                self.scheduler.drop_prefixes()
                self._unavailable = "an update of its weights has failed; call update_weights again"
                self._replace(update)
                self._unavailable = None
            finally:
                # Without weights the next step ends them.
                self.scheduler.release_new(held)
            self._steps.interruption = None
        finally:
            self._turn.leave()

    def sleep(self, *, running: Running = "finish") -> None:
        """Free the memory of weights, caches and graphs until `wake_up`; the engine then refuses requests.

        running: "finish" first decodes all requests, waiting ones too; "abort" ends them with that reason.
        Drops cached prefixes. All ranks sleep together. Raises ValueError for an engine that sleeps, and
        while another thread steps.
        """
        check(running in ("finish", "abort"), "running", "be finish or abort", quote(running), "choose one")
        self._turn.take()
        try:
            self._tidy()
            self._check_open()
            self._check_weights()
            self._inbox.hand_over()
            self._settle((), running, _SLEPT)
            self.scheduler.drop_prefixes()
            self._unavailable = "it sleeps; call wake_up"
            try:
                self.runner.sleep()
            finally:
                if not self.runner.is_asleep:
                    self._unavailable = None
            self._steps.interruption = None
            if self._steps.depths is not None:
                # The wake-up prepares every depth, also those that the start was still loading.
                self._steps.depths.add_depths(self.runner.spec.config.depths)
        finally:
            self._turn.leave()

    def wake_up(self, source: WeightSource | None = None) -> None:
        """Allocate the memory again, with the sizes from before `sleep`, and load the weights.

        source: weights, as for `update_weights`; by default the directory that was read last. After an update
        from tensors, a source must be given. Raises ValueError for an engine that does not sleep, for weights
        that do not fit, and while another thread steps, and the errors of a start if memory is short. The
        engine then stays asleep. After tensors that fail midway it refuses requests until an update succeeds;
        if memory was short, an engine of several ranks has ended.
        """
        self._turn.take()
        try:
            self._tidy()
            self._check_open()
            asleep = self.runner.is_asleep
            check(asleep, "engine", "sleep before it wakes", "one that is awake", "call sleep first")
            has_source = source is not None or not self._has_given_weights
            rule = "be given where the last weights were tensors"
            check(has_source, "source", rule, source, "pass a directory or tensors")
            update = None if source is None else self.runner.check_update(source)
            if update is None or update.path is None:
                self.runner.wake_up(self._weights_path)
            else:
                # A build from these files needs no update after it.
                self.runner.wake_up(update.path)
                self._weights_path, self._has_given_weights = update.path, False
                update = None
            self._unavailable = "its weights were not replaced; call update_weights again"
            if update is not None:
                self._replace(update)
            self._unavailable = None
        finally:
            self._turn.leave()

    def _replace(self, update: WeightUpdate) -> None:
        self.runner.replace_weights(update)
        self._has_given_weights = update.path is None
        self._weights_path = update.path or self._weights_path

    def _settle(self, held: Collection[ScheduledRequest], running: Running, error: str) -> None:
        """Decode every request that is not `held`, or end it with `error`; read every launch.

        Leaves the step marked as interrupted, so that the next call recovers if an exception follows: the
        caller changes the scheduler, and removes the mark.
        """
        self._steps.interruption = _INTERRUPTED
        if running == "abort":
            self.scheduler.end_begun(held, error)
        while not self.scheduler.is_idle(held):
            # Removes the mark.
            self._steps.run_once()
        self._steps.interruption = _INTERRUPTED

    def _check_open(self) -> None:
        if self._is_closed:
            raise ValueError("engine must be open, got one that was closed; make another")

    def _check_serves(self, params: SamplingParams | None) -> None:
        """Raise ValueError while the weights are of no use, and for experts that nothing records."""
        if (
            isinstance(params, SamplingParams)
            and params.return_routed_experts
            and not self.runner.spec.config.routed_experts
        ):
            raise ValueError(
                "return_routed_experts must be left out of an engine without routed_experts, got True; make "
                "Engine(..., routed_experts=True)"
            )
        self._check_weights()

    def _check_weights(self) -> None:
        """Raise ValueError while the weights are of no use."""
        if self._unavailable is not None:
            raise EngineUnavailableError(
                f"engine must have its weights, got one without: {self._unavailable}"
            )
