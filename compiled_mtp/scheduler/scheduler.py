"""The scheduler: requests in, plans out, results in, outputs out."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import NamedTuple

from compiled_mtp.cache.block_pool import BlockPool
from compiled_mtp.plan import StepPlan, StepResult
from compiled_mtp.request import Guide, Request, RequestOutput
from compiled_mtp.scheduler.last_outputs import cut_short
from compiled_mtp.scheduler.limits import Limits
from compiled_mtp.scheduler.live_requests import LiveRequests, id_in_use
from compiled_mtp.scheduler.phases import RequestPhase
from compiled_mtp.scheduler.planner import Planner
from compiled_mtp.scheduler.prefix import PrefixCache
from compiled_mtp.scheduler.resources import Resources
from compiled_mtp.scheduler.results import ReadExperts, Results
from compiled_mtp.scheduler.round_shapes import Depth, Widen
from compiled_mtp.scheduler.scheduled_request import ScheduledRequest


class GuidedWindow(NamedTuple):
    """A request whose rows a grammar masks: rows `row` to `row` + len(drafts) of the plan's rows."""

    guide: Guide
    row: int
    drafts: Sequence[int]


class Scheduler:
    """Continuous batching over slots 1 to max_batch and blocks 1 to num_blocks - 1, first come, first served
    within one priority.

    A request is admitted when there are blocks for its prompt and for the next tokens of all requests
    (`Admission`). When blocks run short, the request of the worst rank is preempted (`Preemption`): it is
    offloaded to host memory, which holds host_records requests and host_blocks blocks, or it waits again and
    is replayed (`Replay`). read_experts(block ids, number of tokens) returns the recorded experts of a
    request that still owns these blocks. For use from one thread; `limits` and `has_id` from any.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        depth: Depth | None = None,
        widen: Widen | None = None,
        read_experts: ReadExperts | None = None,
    ) -> None:
        self.limits = limits
        self._resources = Resources(limits)
        self._planner = Planner(self._resources, depth, widen)
        self._live = LiveRequests(self._planner, self._resources)
        self._results = Results(self._planner, self._resources, self._live, read_experts)
        self._arrivals = itertools.count()

    def add(self, *choices: Request) -> None:
        """Queue a request, given as all of its choices, which `Limits.fit` has accepted.

        May be called again with the same choices after an interrupt at any point. Raises ValueError if the
        request's id is in use.
        """
        name = choices[0].request_id
        entered = self._live.choices.get(name)
        if entered is None or entered[0].request is not choices[0]:
            if self.has_id(name):
                raise id_in_use(name)
            # One store makes all choices live before the first is queued.
            entered = [ScheduledRequest(request, next(self._arrivals)) for request in choices]
            self._live.choices[name] = entered
        for scheduled in entered:
            self._planner.admission.enter(scheduled)

    def abort(self, request_id: str) -> None:
        """End all choices of a request now; their last outputs have finish_reason "abort".

        The tokens of launches in flight are dropped. Raises ValueError for an id without a live request.
        """
        for scheduled in self._live.find(request_id):
            self._live.end(scheduled, "abort")

    def forget(self, request_ids: Collection[str]) -> None:
        """End the live requests of these ids now, without an output."""
        for request_id in request_ids:
            for scheduled in list(self._live.choices.get(request_id, ())):
                scheduled.request.finish("abort")
                self._live.finish(scheduled)
        self.take_outputs(request_ids)

    def forget_all(self) -> None:
        """End every request now, without an output."""
        self.forget(tuple(self._live.choices))
        self._live.outputs = []

    def hold_new(self) -> Collection[ScheduledRequest]:
        """Admit none of the requests of which no choice has begun; return their choices for `release_new`."""
        # A choice that is not live any more has ended.
        names = {
            name
            for name, choices in self._live.choices.items()
            if len(choices) == choices[0].request.params.n and all(map(_is_new, choices))
        }
        return self._planner.admission.hold(names)

    def release_new(self, held: Collection[ScheduledRequest]) -> None:
        """Admit requests again that `hold_new` returned, unless they have ended."""
        for scheduled in held:
            if scheduled.phase is RequestPhase.WAITING and scheduled.request.request_id in self._live.choices:
                self._planner.admission.enter(scheduled)

    def end_begun(self, held: Collection[ScheduledRequest], error: str) -> None:
        """End every request that is not `held`, with finish_reason "abort" and this error."""
        kept = set(map(id, held))
        for choices in list(self._live.choices.values()):
            for scheduled in [one for one in choices if id(one) not in kept]:
                self._live.end(scheduled, "abort", error)

    def is_idle(self, held: Collection[ScheduledRequest]) -> bool:
        """Whether no launch is unread, no copy is under way, and only `held` requests are live."""
        num_live = sum(map(len, self._live.choices.values()))
        num_held = sum(one.phase is RequestPhase.WAITING for one in held)
        return num_live == num_held and self._resources.is_idle and not self._planner.has_unread

    def drop_prefixes(self) -> None:
        """Forget every cached prefix; no request may own a slot, and no copy be under way."""
        assert self._resources.is_idle
        self._resources.reset()

    def recover(self, error: str) -> None:
        """Rebuild all bookkeeping after a step that an interrupt (Ctrl-C) stopped at any point.

        Requests that were no longer waiting end with `error`; the others go on. No launch may still run. If
        this call is interrupted, call it again before all else: until it returns, `_live.choices` is
        unchanged, and a request that has a last output gets no other.
        """
        outputs, live = self._live.outputs, dict[str, list[ScheduledRequest]]()
        settled = {
            (output.request_id, output.index) for output in outputs if output.finish_reason is not None
        }
        for scheduled in itertools.chain(*self._live.choices.values()):
            if scheduled.request.key in settled:
                continue
            # Trust the phase alone: `waiting` and the waiting queue may be inconsistent.
            if scheduled.phase is RequestPhase.WAITING:
                live.setdefault(scheduled.request.request_id, []).append(scheduled)
            else:
                outputs.append(cut_short(scheduled.request, "error", error, outputs))
        waiting = {one.request.key: one for one in itertools.chain(*live.values())}
        self._planner.admission.waiting = waiting
        self._planner.reset()
        self._resources.reset()
        self._live.choices = live

    def schedule(self) -> StepPlan | None:
        """Plan the next launch and reserve every block it may write; None if there is nothing to launch."""
        return self._planner.schedule()

    def update(self, result: StepResult | None) -> None:
        """Take the result of a launch, if there is one; `take_outputs` returns what the requests gained.

        Tokens of requests that ended meanwhile are dropped. An error ends only the requests of its launch and
        copies. It may precede older results, because a launch can fail at once.
        """
        if result is not None:
            self._results.take(result)

    def windows(self, plan: StepPlan) -> list[GuidedWindow]:
        """Return the requests of a plan whose rows need masks. All their tokens must have been read."""
        found = []
        for index, owner in enumerate(zip(plan.slots, plan.generations, strict=True)):
            scheduled = self._resources.owners.get(owner[0])
            if scheduled is None or scheduled.generation != owner[1] or scheduled.request.guide is None:
                continue
            verify = plan.shape.verify
            row, drafts = index * (verify + 1), scheduled.round_drafts(verify)
            found.append(GuidedWindow(scheduled.request.guide, row, drafts))
        return found

    def take_outputs(
        self, request_ids: Collection[str] | None = None, excluding: Collection[str] = ()
    ) -> list[RequestOutput]:
        """Return, once, the outputs of these requests; of all requests except `excluding` for None."""
        return self._live.take_outputs(request_ids, excluding)

    @property
    def outputs(self) -> Sequence[RequestOutput]:
        """The outputs that were not taken yet."""
        return self._live.outputs

    def put_back(self, outputs: Sequence[RequestOutput]) -> None:
        """Restore `outputs`, the value before a `take_outputs` whose result was lost."""
        self._live.outputs = list(outputs)

    def has_unfinished(self, excluding: Collection[str] = ()) -> bool:
        """Return whether a request is live or an output waits to be taken; outputs of `excluding` do not
        count.
        """
        return bool(self._live.choices) or any(
            output.request_id not in excluding for output in self._live.outputs
        )

    def is_live(self, request_id: str) -> bool:
        """Whether the id names a request that has not finished."""
        return request_id in self._live.choices

    def has_id(self, request_id: str) -> bool:
        """Whether an id is in use: its request has not finished, or its last output was not taken."""
        return request_id in self._live.choices or any(o.request_id == request_id for o in self._live.outputs)

    @property
    def pool(self) -> BlockPool:
        """The device's KV blocks."""
        return self._resources.pool

    @property
    def prefix(self) -> PrefixCache:
        """The prefix cache."""
        return self._resources.prefix

    @property
    def num_running(self) -> int:
        """Requests that own a slot."""
        return len(self._resources.owners)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a slot or for blocks."""
        return len(self._planner.admission.waiting)

    @property
    def num_offloaded(self) -> int:
        """Preemptions, for lack of blocks, that offloaded the request to host memory."""
        return self._planner.num_offloaded

    @property
    def num_recomputed(self) -> int:
        """Preemptions, for lack of blocks, of requests that must be recomputed."""
        return self._planner.num_recomputed

    @property
    def running(self) -> dict[int, Request]:
        """The requests whose whole prompts have been planned, by slot."""
        owners = self._resources.owners.items()
        return {slot: one.request for slot, one in owners if one.phase is RequestPhase.RUNNING}

    def check_integrity(self) -> None:
        """Raise AssertionError unless every slot, block and record is free or owned once, and every phase
        agrees with what its request owns.
        """
        live = [scheduled for choices in self._live.choices.values() for scheduled in choices]
        self._resources.check_integrity(live)
        self._planner.check_integrity()
        assert all(self._live.choices.values())
        assert self._planner.admission.waiting.keys() <= {scheduled.request.key for scheduled in live}
        for scheduled in live:
            assert (scheduled.phase is RequestPhase.WAITING) == (
                scheduled.request.key in self._planner.admission.waiting
            )


def _is_new(scheduled: ScheduledRequest) -> bool:
    """Whether a choice waits and has no token."""
    return scheduled.phase is RequestPhase.WAITING and not scheduled.request.output_token_ids
