"""Connects the depth controller with the engine: chooses depths, times rounds and records them. No torch."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence

from compiled_mtp.plan import Copy, Draft, StepPlan, StepResult
from compiled_mtp.spec.depth import DepthController, Reason, context_class, context_span
from compiled_mtp.spec.lookup import WideRounds

_NO_SLOTS: frozenset[int] = frozenset()
_REASONS: tuple[Reason, ...] = ("best", "probe", "retry", "only")


class DepthPolicy:
    """Chooses one depth per round for the batch, and counts rounds by depth and reason.

    depths: those that are ready; sizes: the numbers of requests of the compiled buckets, ascending; clock:
    returns seconds. A round's time ends at its result. It begins at its launch, or at the previous result if
    that came later, because with a launch in flight the device runs one after the other without a pause. If
    the launch in flight is not a round, the time of a late result is that of the device's own clock: a prompt
    chunk may occupy the host for longer than the device runs the round. Without that clock it is dropped.
    After a result that was read late, the time begins at the launch unless its own result is late too: a time
    may be too long, never too short. Rounds with looked-up drafts show nothing of a chain: `wide` records
    them. For the thread that steps; any thread may call `rounds`.
    """

    def __init__(
        self,
        depths: Iterable[int],
        sizes: Sequence[int],
        clock: Callable[[], float] = time.perf_counter,
        wide_drafts: int = 0,
    ) -> None:
        self._clock = clock
        self.wide = WideRounds(wide_drafts)
        self._depth = 0
        self.controller = DepthController(depths)
        self._sizes = sizes
        self._counts = {depth: dict.fromkeys(_REASONS, 0) for depth in self.controller.depths}
        # The current context class, and its bounds: lengths above the first, up to the second.
        self._context, self._context_span = 0, (-1, 0)
        # Buckets by (number of requests, is_two_phase); then this pair and the bucket of the last planned
        # round.
        self._buckets: dict[tuple[int, bool], tuple[int, bool]] = {}
        self._planned, self._planned_bucket = (0, False), (0, False)
        self._launched_s: dict[int, float] = {}
        # The step id of the last launch that was not part of a round.
        self._other_step_id = -1
        # When the last result was read, and whether late. For a round whose verify was read: the step id of
        # its accept, when the verify began, and the replayed slots.
        self._last_s, self._is_late = 0.0, False
        self._open_verify: tuple[int, float, frozenset[int]] | None = None

    def add_depths(self, depths: Iterable[int]) -> None:
        """Take further depths, whose programs have become ready; those that it has stay as they are."""
        for depth in depths:
            if depth not in self._counts:
                self._counts = {**self._counts, depth: dict.fromkeys(_REASONS, 0)}
                self.controller.add_depth(depth)

    def choose(self, num_requests: int, context_tokens: int, is_two_phase: bool) -> int:
        """Return the depth of the next round; with 0 requests, the depth of the first tokens before any
        round."""
        controller = self.controller
        if not num_requests:
            return controller.depth
        above, most = self._context_span
        if not above < context_tokens <= most:
            self._context, self._context_span = context_class(context_tokens), context_span(context_tokens)
        planned = (num_requests, is_two_phase)
        if planned != self._planned:
            self._planned, self._planned_bucket = planned, self._bucket(planned)
        self._depth = depth = controller.choose(self._planned_bucket, self._context)
        self._counts[depth][controller.reason] += 1
        return depth

    def widen(self) -> bool:
        """Return whether the round of the last `choose`, which has looked-up drafts, verifies all of them."""
        return self.wide.pays(self._depth, (self._planned_bucket, self._context))

    def launch(self, plan: StepPlan) -> None:
        """Note that `plan` is about to be launched."""
        if plan.kind in ("decode", "verify"):
            self._launched_s[plan.step_id] = self._clock()
        elif plan.kind != "accept":
            self._other_step_id = plan.step_id

    def read(self, result: StepResult) -> None:
        """Record a result, which was read just now."""
        plan, now_s = result.plan, self._clock()
        begin_s = self._launched_s.pop(plan.step_id, now_s)
        is_exact = not result.is_late
        if begin_s < self._last_s:
            if self._is_late and (plan.kind == "verify" or not result.is_late):
                is_exact = False
            else:
                begin_s = self._last_s
        opened, self._open_verify = self._open_verify, None
        self._last_s, self._is_late = now_s, result.is_late
        if result.error is not None:
            return
        replayed = _replayed(plan) if plan.moves else _NO_SLOTS
        # The most frequent kind is tested first.
        if plan.kind != "decode":
            if plan.kind == "verify":
                self._open_verify = (plan.step_id + 1, begin_s, replayed)
            # Given tokens show nothing of a depth.
            if plan.kind != "accept" or plan.is_given:
                return
            # With a prompt chunk between the two phases, the time is not the round's.
            is_next = opened is not None and opened[0] == plan.step_id
            begin_s, replayed = opened[1:] if opened is not None and is_next else (now_s, replayed)
        token_ids = result.token_ids
        if replayed:
            rows = zip(plan.slots, token_ids, strict=True)
            token_ids = [new for slot, new in rows if slot not in replayed]
            self.controller.record_round(plan.num_drafts, token_ids)
        else:
            self._record_round(result)
        # Most plans have neither moves nor a catch-up, so the call is avoided.
        if (plan.moves or plan.catches_up) and _is_disturbed(plan):
            return
        seconds = now_s - begin_s
        if not is_exact and self._other_step_id > plan.step_id:
            seconds = (plan.kind == "decode" and result.device_s) or 0.0
        if seconds > 0.0:
            read = (len(plan.slots), plan.kind == "accept")
            bucket = self._planned_bucket if read == self._planned else self._bucket(read)
            verify, depth = plan.shape
            if result.matches:
                time_class = (bucket, self._context)
                self.wide.record_time(depth, time_class, seconds, is_wide=verify > depth)
            if verify == depth:
                self.controller.record_time(depth, bucket, self._context, seconds)

    def _record_round(self, result: StepResult) -> None:
        """Record what a round kept: of a chain's drafts for the controller, of looked-up ones for `wide`."""
        plan, token_ids = result.plan, result.token_ids
        (verify, depth), matches = plan.shape, result.matches
        is_looked_up = [verified > 0 for verified, _ in matches] if matches else []
        for new, is_one in zip(token_ids, is_looked_up, strict=False):
            if is_one or verify > depth:
                self.wide.record_round(depth, verify, max(len(new) - 1, 0), is_looked_up=is_one)
        if True in is_looked_up:
            if False not in is_looked_up:
                return
            token_ids = [[] if is_one else new for new, is_one in zip(token_ids, is_looked_up, strict=True)]
        self.controller.record_round(plan.num_drafts, token_ids)

    def forget_launches(self) -> None:
        """Forget launches that were dropped: they have no results."""
        self._launched_s.clear()
        self._open_verify = None

    def rounds(self) -> Mapping[int, Mapping[Reason, int]]:
        """Return the rounds by depth and reason."""
        return {depth: dict(counts) for depth, counts in self._counts.items()}

    def _bucket(self, batch: tuple[int, bool]) -> tuple[int, bool]:
        """Return the bucket of (number of requests, is_two_phase)."""
        bucket = self._buckets.get(batch)
        if bucket is None:
            size = self._sizes[bisect_left(self._sizes, batch[0])]
            bucket = self._buckets[batch] = (size, batch[1])
        return bucket


def _replayed(plan: StepPlan) -> frozenset[int]:
    """Return the replayed slots: their drafts are known tokens, whose acceptance shows nothing."""
    return frozenset(move.slot for move in plan.moves if isinstance(move, Draft))


def _is_disturbed(plan: StepPlan) -> bool:
    """Whether something other than the round took device time."""
    if any(isinstance(move, Copy) for move in plan.moves):
        return True
    return plan.catches_up and plan.shape.verify > 0
