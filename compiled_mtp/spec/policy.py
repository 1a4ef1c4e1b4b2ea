"""The depth controller beside the engine: asked when a round is planned, told what came of it. No torch."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence

from compiled_mtp.plan import Copy, Draft, StepPlan, StepResult
from compiled_mtp.spec.depth import DepthController, Reason, context_class, context_span

_NOBODY: frozenset[int] = frozenset()
_REASONS: tuple[Reason, ...] = ("best", "probe", "retry", "only")


class DepthPolicy:
    """One depth a round for the batch, and how many rounds had which for what reason.

    depths: those that are ready; sizes: the numbers of requests that compiled rounds hold, ascending. A
    round's time runs from its launch, or from the result before it if that came later, to its own result:
    with a launch in flight the device goes from one to the next without a pause. If that launch is no round,
    the time is not taken: a prompt's chunk may keep the host for longer than the device has the round. Behind
    a result that was read late it runs from the launch unless its own is late too: a time may be too long,
    never too short.
    `clock` gives seconds. For the thread that steps; `rounds` may be called by any.
    """

    def __init__(
        self, depths: Iterable[int], sizes: Sequence[int], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._clock = clock
        self.controller = DepthController(depths)
        self._sizes = sizes
        self._counts = {depth: dict.fromkeys(_REASONS, 0) for depth in self.controller.depths}
        # The class of the contexts' length, and the lengths that have it: above the first, up to the second.
        self._context, self._context_span = 0, (-1, 0)
        # Of each number of requests, in whole rounds and in halves; and of the last round that was planned.
        self._buckets: dict[tuple[int, bool], tuple[int, bool]] = {}
        self._planned, self._planned_bucket = (0, False), (0, False)
        self._launched_s: dict[int, float] = {}
        # The number of the last launch that was no round.
        self._other_step_id = -1
        # When a result was read last, and whether late; of a round whose first opened was, when that began,
        # and who is replayed.
        self._last_s, self._is_late = 0.0, False
        self._open_verify: tuple[int, float, frozenset[int]] | None = None

    def add_depth(self, depth: int) -> None:
        """Take one more depth, whose programs have become ready."""
        self._counts = {**self._counts, depth: dict.fromkeys(_REASONS, 0)}
        self.controller.add_depth(depth)

    def choose(self, num_requests: int, context_tokens: int, is_two_phase: bool) -> int:
        """The depth of the next round; with no requests, of the first tokens before it."""
        controller = self.controller
        if not num_requests:
            return controller.depth
        above, most = self._context_span
        if not above < context_tokens <= most:
            self._context, self._context_span = context_class(context_tokens), context_span(context_tokens)
        planned = (num_requests, is_two_phase)
        if planned != self._planned:
            self._planned, self._planned_bucket = planned, self._bucket(planned)
        depth = controller.choose(self._planned_bucket, self._context)
        self._counts[depth][controller.reason] += 1
        return depth

    def launch(self, plan: StepPlan) -> None:
        """`plan` is about to be launched."""
        if plan.kind in ("decode", "verify"):
            self._launched_s[plan.step_id] = self._clock()
        elif plan.kind != "accept":
            self._other_step_id = plan.step_id

    def read(self, result: StepResult) -> None:
        """Learn from a result that has come right now."""
        plan, now_s = result.plan, self._clock()
        begin_s = self._launched_s.pop(plan.step_id, now_s)
        if begin_s < self._last_s and not (self._is_late and (plan.kind == "verify" or not result.is_late)):
            begin_s = self._last_s
        opened, self._open_verify, self._last_s, self._is_late = (
            self._open_verify,
            None,
            now_s,
            result.is_late,
        )
        if result.error is not None:
            return
        replayed = _replayed(plan) if plan.moves else _NOBODY
        # The usual kind is asked for first.
        if plan.kind != "decode":
            if plan.kind == "verify":
                self._open_verify = (plan.step_id + 1, begin_s, replayed)
            if plan.kind != "accept":
                return
            # With a chunk between the halves the time is not the round's.
            is_next = opened is not None and opened[0] == plan.step_id
            begin_s, replayed = opened[1:] if opened is not None and is_next else (now_s, replayed)
        token_ids = result.token_ids
        if replayed:
            rows = zip(plan.slots, token_ids, strict=True)
            token_ids = [new for slot, new in rows if slot not in replayed]
        self.controller.record_round(plan.num_drafts, token_ids)
        # Most plans have neither.
        if (plan.moves or plan.catches_up) and _is_disturbed(plan):
            return
        if now_s > begin_s and self._other_step_id < plan.step_id:
            read = (len(plan.slots), plan.kind == "accept")
            bucket = self._planned_bucket if read == self._planned else self._bucket(read)
            self.controller.record_time(plan.shape.verify, bucket, self._context, now_s - begin_s)

    def forget_launches(self) -> None:
        """Launches were dropped: their results will not come."""
        self._launched_s.clear()
        self._open_verify = None

    def rounds(self) -> Mapping[int, Mapping[Reason, int]]:
        """Rounds by depth and reason."""
        return {depth: dict(counts) for depth, counts in self._counts.items()}

    def _bucket(self, batch: tuple[int, bool]) -> tuple[int, bool]:
        """Of a number of requests, in a whole round or in halves."""
        bucket = self._buckets.get(batch)
        if bucket is None:
            size = self._sizes[bisect_left(self._sizes, batch[0])]
            bucket = self._buckets[batch] = (size, batch[1])
        return bucket


def _replayed(plan: StepPlan) -> frozenset[int]:
    """The slots whose drafts are tokens that they had before: that these are right says nothing."""
    return frozenset(move.slot for move in plan.moves if isinstance(move, Draft))


def _is_disturbed(plan: StepPlan) -> bool:
    """Whether something else than the round took time."""
    if any(isinstance(move, Copy) for move in plan.moves):
        return True
    return plan.catches_up and plan.shape.verify > 0
