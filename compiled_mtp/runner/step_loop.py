"""The order of a step: aborts, plan, masks, launch, result; and what follows an interrupt."""

from __future__ import annotations

from compiled_mtp.graphs.later import LaterDepths
from compiled_mtp.plan import StepPlan, StepResult
from compiled_mtp.runner.masks import Masks
from compiled_mtp.runner.runner import Runner
from compiled_mtp.scheduler import Scheduler
from compiled_mtp.scheduler.inbox import Inbox
from compiled_mtp.spec.policy import DepthPolicy


class StepLoop:
    """Plans, runs and reads one launch after another; for the thread that has the engine's `Turn`.

    depths: the policy that chooses the shape of each round; None if all rounds have the same. interruption:
    why a step was interrupted, until the scheduler has recovered; None otherwise.
    """

    def __init__(
        self, runner: Runner, scheduler: Scheduler, inbox: Inbox, masks: Masks, depths: DepthPolicy | None
    ) -> None:
        self.runner, self.scheduler, self.inbox, self.masks = runner, scheduler, inbox, masks
        self.depths = depths
        self.interruption: str | None = None

    def run_once(self) -> StepPlan | None:
        """Plan, run and read one launch; recover from an exception."""
        self.interruption = "the step was interrupted"
        try:
            plan = self._run_next()
            self.interruption = None
            return plan
        except BaseException as error:
            self.interruption = f"the step was interrupted by {error!r}"
            self.recover()
            raise

    def recover(self) -> None:
        """Recover from an interrupted step; if this is interrupted too, the next step repeats it."""
        if self.interruption is None:
            return
        try:
            self.runner.drop_launches()
        finally:
            # Also if a second interrupt ends the wait for copies.
            if self.depths is not None:
                self.depths.forget_launches()
            self.scheduler.recover(self.interruption)
        self.interruption = None

    def _run_next(self) -> StepPlan | None:
        """Pass on the aborts, plan, launch and read; return the plan."""
        self.inbox.pass_aborts()
        self.inbox.end_left_streams()
        if self.depths is not None and self.runner.later is not None:
            self._take_depth(self.depths, self.runner.later)
        plan = self.scheduler.schedule()
        result = self._launch(plan)
        if self.depths is not None and result is not None:
            self.depths.read(result)
        self.scheduler.update(result)
        return plan

    def _launch(self, plan: StepPlan | None) -> StepResult | None:
        """Make the plan's masks and run it. Masks that cannot be made (no memory) fail their launch alone."""
        if plan is not None and plan.is_guided:
            try:
                # Meanwhile the device runs the verify phase of the round.
                masks = self.masks.fill(plan, self.scheduler.windows(plan))
            except AssertionError:  # A bug of ours.
                raise
            except Exception as error:
                return self.runner.fail(plan, error)
            self.runner.set_masks(plan, masks)
        if self.depths is not None and plan is not None:
            self.depths.launch(plan)
        return self.runner.run(plan)

    def _take_depth(self, depths: DepthPolicy, later: LaterDepths) -> None:
        """Add a depth whose programs have become ready, if one has."""
        depth = later.take()
        if depth is not None:
            depths.add_depths((depth,))
        elif later.is_done:
            self.runner.later = None
