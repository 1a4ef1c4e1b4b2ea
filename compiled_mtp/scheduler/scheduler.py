"""The scheduler: requests in, plans out, results in, outputs out."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from compiled_mtp.cache.block_pool import BlockPool
from compiled_mtp.errors import quote
from compiled_mtp.plan import Copy, RowLogprobs, StepPlan, StepResult, new_tuple
from compiled_mtp.request import (
    ErrorKind,
    FinishReason,
    Guide,
    Request,
    RequestOutput,
    RoutedExperts,
)
from compiled_mtp.scheduler.last_outputs import cut_short, describe_logits, describe_masks, last_output
from compiled_mtp.scheduler.limits import Limits
from compiled_mtp.scheduler.phases import RequestPhase
from compiled_mtp.scheduler.planner import Planner
from compiled_mtp.scheduler.prefix import PrefixCache
from compiled_mtp.scheduler.replay import drop_rows
from compiled_mtp.scheduler.resources import Resources
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
        read_experts: Callable[[Sequence[int], int], RoutedExperts] | None = None,
    ) -> None:
        self.limits = limits
        self._read_experts = read_experts
        self._resources = Resources(limits)
        self._planner = Planner(self._resources, depth, widen)
        # The choices that have not ended, by request id.
        self._live: dict[str, list[ScheduledRequest]] = {}
        self._arrivals = itertools.count()
        self._outputs: list[RequestOutput] = []

    def add(self, *choices: Request) -> None:
        """Queue a request, given as all of its choices, which `Limits.fit` has accepted.

        May be called again with the same choices after an interrupt at any point. Raises ValueError if the
        request's id is in use.
        """
        name = choices[0].request_id
        resources = self._live.get(name)
        if resources is None or resources[0].request is not choices[0]:
            if self.has_id(name):
                raise ValueError(f"request_id must be unused, got {quote(name)}; choose another")
            # One store makes all choices live before the first is queued.
            resources = [ScheduledRequest(request, next(self._arrivals)) for request in choices]
            self._live[name] = resources
        for scheduled in resources:
            self._planner.enter(scheduled)

    def abort(self, request_id: str) -> None:
        """End all choices of a request now; their last outputs have finish_reason "abort".

        The tokens of launches in flight are dropped. Raises ValueError for an id without a live request.
        """
        for scheduled in self._find_choices(request_id):
            self._end(scheduled, "abort")

    def forget(self, request_ids: Collection[str]) -> None:
        """End the live requests of these ids now, without an output."""
        for request_id in request_ids:
            for scheduled in list(self._live.get(request_id, ())):
                scheduled.request.finish("abort")
                self._finish(scheduled)
        self.take_outputs(request_ids)

    def forget_all(self) -> None:
        """End every request now, without an output."""
        self.forget(tuple(self._live))
        self._outputs = []

    def hold_new(self) -> Collection[ScheduledRequest]:
        """Admit none of the requests of which no choice has begun; return their choices for `release_new`."""
        names = {name for name, choices in self._live.items() if all(map(_is_new, choices))}
        # A choice that is not live any more has ended.
        names = {name for name in names if len(self._live[name]) == self._live[name][0].request.params.n}
        return self._planner.hold(names)

    def release_new(self, held: Collection[ScheduledRequest]) -> None:
        """Admit requests again that `hold_new` returned, unless they have ended."""
        for scheduled in held:
            if scheduled.phase is RequestPhase.WAITING and scheduled.request.request_id in self._live:
                self._planner.enter(scheduled)

    def end_begun(self, held: Collection[ScheduledRequest], error: str) -> None:
        """End every request that is not `held`, with finish_reason "abort" and this error."""
        kept = set(map(id, held))
        for choices in list(self._live.values()):
            for scheduled in [one for one in choices if id(one) not in kept]:
                self._end(scheduled, "abort", error)

    def is_idle(self, held: Collection[ScheduledRequest]) -> bool:
        """Whether no launch is unread, no copy is under way, and only `held` requests are live."""
        num_live = sum(map(len, self._live.values()))
        num_held = sum(one.phase is RequestPhase.WAITING for one in held)
        return num_live == num_held and self._resources.is_idle and not self._planner.has_unread

    def drop_prefixes(self) -> None:
        """Forget every cached prefix; no request may own a slot, and no copy be under way."""
        assert self._resources.is_idle
        self._resources.reset()

    def recover(self, error: str) -> None:
        """Rebuild all bookkeeping after a step that an interrupt (Ctrl-C) stopped at any point.

        Requests that were no longer waiting end with `error`; the others go on. No launch may still run. If
        this call is interrupted, call it again before all else: until it returns, `_live` is unchanged, and a
        request that has a last output gets no other.
        """
        settled = {(out.request_id, out.index) for out in self._outputs if out.finish_reason is not None}
        unsettled = [h for choices in self._live.values() for h in choices if h.request.key not in settled]
        live: dict[str, list[ScheduledRequest]] = {}
        for scheduled in unsettled:
            # Trust the phase alone: `waiting` and the waiting queue may be inconsistent.
            if scheduled.phase is RequestPhase.WAITING:
                live.setdefault(scheduled.request.request_id, []).append(scheduled)
            else:
                self._outputs.append(cut_short(scheduled.request, "error", error, self._outputs))
        self._planner.waiting = {one.request.key: one for choices in live.values() for one in choices}
        self._planner.reset()
        self._resources.reset()
        self._live = live

    def schedule(self) -> StepPlan | None:
        """Plan the next launch and reserve every block it may write; None if there is nothing to launch."""
        return self._planner.schedule()

    def update(self, result: StepResult | None) -> None:
        """Take the result of a launch, if there is one; `take_outputs` returns what the requests gained.

        Tokens of requests that ended meanwhile are dropped. An error ends only the requests of its launch and
        copies. It may precede older results, because a launch can fail at once.
        """
        if result is None:
            return
        plan = result.plan
        if result.copies_failed:
            self._planner.cancel_copies(result.copies_failed)
        if result.copies_done:
            self._planner.finish_copies(result.copies_done)
        if result.error is not None:
            self._take_error(plan, result.error)
            return
        self._planner.read(plan)
        if result.prompt_logprobs is not None:
            self._take_prompt_logprobs(plan, result.prompt_logprobs)
        if plan.kind in ("first", "decode", "accept") or plan.ended:
            self._take_tokens(result)

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
        taken: list[RequestOutput] = self._outputs
        left: list[RequestOutput] = []
        if request_ids is not None or excluding:
            is_taken = [
                output.request_id not in excluding
                if request_ids is None
                else output.request_id in request_ids
                for output in self._outputs
            ]
            taken = [output for output, is_one in zip(self._outputs, is_taken, strict=True) if is_one]
            left = [output for output, is_one in zip(self._outputs, is_taken, strict=True) if not is_one]
        self._outputs = left
        return taken

    @property
    def outputs(self) -> Sequence[RequestOutput]:
        """The outputs that were not taken yet."""
        return self._outputs

    def put_back(self, outputs: Sequence[RequestOutput]) -> None:
        """Restore `outputs`, the value before a `take_outputs` whose result was lost."""
        self._outputs = list(outputs)

    def has_unfinished(self, excluding: Collection[str] = ()) -> bool:
        """Return whether a request is live or an output waits to be taken; outputs of `excluding` do not
        count.
        """
        return bool(self._live) or any(output.request_id not in excluding for output in self._outputs)

    def is_live(self, request_id: str) -> bool:
        """Whether the id names a request that has not finished."""
        return request_id in self._live

    def has_id(self, request_id: str) -> bool:
        """Whether an id is in use: its request has not finished, or its last output was not taken."""
        return request_id in self._live or any(o.request_id == request_id for o in self._outputs)

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
        return len(self._planner.waiting)

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

    def phase(self, request_id: str) -> RequestPhase:
        """Return the phase of a request's first live choice. Raises ValueError for an id without a live
        request.
        """
        return self._find_choices(request_id)[0].phase

    def check_integrity(self) -> None:
        """Raise AssertionError unless every slot, block and record is free or owned once, and every phase
        agrees with what its request owns.
        """
        live = [scheduled for choices in self._live.values() for scheduled in choices]
        self._resources.check_integrity(live)
        self._planner.check_integrity()
        assert all(self._live.values())
        assert self._planner.waiting.keys() <= {scheduled.request.key for scheduled in live}
        for scheduled in live:
            assert (scheduled.phase is RequestPhase.WAITING) == (
                scheduled.request.key in self._planner.waiting
            )

    def _find_choices(self, request_id: str) -> list[ScheduledRequest]:
        choices = self._live.get(request_id)
        if choices is None:
            raise ValueError(
                f"request_id must name a request that has not finished, got {quote(request_id)}; give a "
                "live one"
            )
        return list(choices)

    def _take_prompt_logprobs(self, plan: StepPlan, rows: RowLogprobs) -> None:
        scheduled = self._resources.owners.get(plan.slots[0])
        if scheduled is not None and scheduled.generation == plan.generations[0]:
            scheduled.request.add_prompt_logprobs(plan.prompt_chunks[0].start, plan.next_ids, rows)

    def _take_tokens(self, result: StepResult) -> None:
        # This loop is most of a step's time on the host: what all requests share is read before it.
        plan, owners, outputs = result.plan, self._resources.owners, self._outputs
        is_round, wants_drafts = plan.kind in ("decode", "accept"), plan.wants_drafts
        num_drafts = plan.num_drafts if is_round else None
        prompt_chunks, matches, most = plan.prompt_chunks, result.matches, plan.shape.verify + 1
        has_logprobs = plan.logprobs >= 0
        now_s = time.monotonic()
        for index in (*result.not_finite, *result.all_masked):
            self._take_last_tokens(result, index, num_drafts, now_s)
        rows = zip(plan.slots, plan.generations, result.token_ids, strict=True)
        for index, (slot, generation, new) in enumerate(rows):
            scheduled = owners.get(slot)
            is_due = not prompt_chunks or prompt_chunks[index].is_last
            if not is_due or scheduled is None or scheduled.generation != generation:
                continue
            request = scheduled.request
            assert 1 <= len(new) <= most, f"a {plan.kind} step emitted {len(new)} tokens"
            if not is_round:
                scheduled.is_first_token_due = False
                self._resources.prefix.enter(scheduled)
            drafts, own_drafts, num_known, is_looked_up = None, num_drafts, 0, False
            if matches:
                is_looked_up = is_round and matches[index][0] > 0
                own_drafts = most - 1 if is_looked_up else num_drafts
                scheduled.has_text_drafts = matches[index][1] > 0
            if wants_drafts:
                drafts = scheduled.drafts if is_round else None
                scheduled.drafts = result.drafts[index]
            logprobs = result.logprobs[index] if has_logprobs else None
            if scheduled.replay is not None:
                num_known = len(new)
                new, own_drafts, logprobs = self._drop_known(scheduled, new, own_drafts, logprobs)
                if not new:
                    continue
                num_known -= len(new)
            kept, text = request.append(new, own_drafts, now_s, is_looked_up=is_looked_up, logprobs=logprobs)
            reason = request.finish_reason
            fields = (
                request.request_id,
                kept,
                text,
                request.metrics,
                reason,
                request.error,
                # A plan without logprobs or wants_drafts has no request that asks for these.
                request.take_logprobs() if has_logprobs else None,
                request.index,
                # The prompt's log probabilities come with the first token.
                None if is_round else request.take_prompt_logprobs(),
                request.list_drafts(drafts, num_known) if wants_drafts else None,
                # `append` ends a request with an error only when its grammar cannot continue.
                "parameters" if reason == "error" else None,
                None if reason is None else self._experts_of(scheduled),
            )
            outputs.append(new_tuple(RequestOutput, fields))
            request.commit()
            if reason is not None:
                self._finish(scheduled)

    def _experts_of(self, scheduled: ScheduledRequest) -> RoutedExperts | None:
        """Read the recorded experts of a request that ends; None unless it is whole and asked for them."""
        request = scheduled.request
        is_whole = request.finish_reason in ("stop", "length")
        if self._read_experts is None or not (is_whole and request.params.return_routed_experts):
            return None
        # The last token was never an input.
        count = request.prompt_len + len(request.output_token_ids) - 1
        return self._read_experts(scheduled.block_ids[: self.limits.blocks_up_to(count - 1)], count)

    def _take_last_tokens(self, result: StepResult, index: int, num_drafts: int | None, now_s: float) -> None:
        """Take the tokens before one that could not be drawn, and end the request.

        It ends with an error, unless these tokens end it themselves.
        """
        plan = result.plan
        scheduled = self._resources.owners.get(plan.slots[index])
        if scheduled is None or scheduled.generation != plan.generations[index]:
            return
        request = scheduled.request
        kept, text, drafts, num_known = result.token_ids[index], "", None, 0
        is_looked_up = num_drafts is not None and bool(result.matches) and result.matches[index][0] > 0
        if is_looked_up:
            num_drafts = plan.shape.verify
        logprobs = result.logprobs[index] if plan.logprobs >= 0 else None
        if scheduled.replay is not None:
            num_known = len(kept)
            kept, num_drafts, logprobs = self._drop_known(scheduled, kept, num_drafts, logprobs)
            if request.finish_reason is not None:
                return
            num_known -= len(kept)
        if num_drafts is not None:
            kept, text = request.append(
                kept, num_drafts, now_s, has_bonus=False, is_looked_up=is_looked_up, logprobs=logprobs
            )
            drafts = request.list_drafts(scheduled.drafts, num_known)
        if request.finish_reason is None:
            is_masked = index in result.all_masked
            error = describe_masks(request) if is_masked else describe_logits(request)
            kind: ErrorKind = "parameters" if is_masked else "engine"
            output = last_output(request, "error", error, kept, text, drafts, kind)
        else:
            reason = request.finish_reason
            output = last_output(request, reason, request.error, kept, text, drafts, "parameters")
        self._outputs.append(output)
        self._finish(scheduled)

    def _drop_known(
        self,
        scheduled: ScheduledRequest,
        token_ids: list[int],
        num_drafts: int | None,
        logprobs: RowLogprobs | None,
    ) -> tuple[list[int], int | None, RowLogprobs | None]:
        """Compare the tokens of a result with known ones of the replay; return the rest of the result.

        Returns the new tokens, their number of drafts and their log probabilities. Ends the request with an
        error if a token differs from the known one.
        """
        replay, request = scheduled.replay, scheduled.request
        assert replay is not None
        try:
            known = replay.compare(token_ids)
        except ValueError as error:
            self._end(scheduled, "error", str(error))
            return [], num_drafts, None
        if request.guide is not None:
            request.guide.accept(token_ids[:known])
        if replay.is_over:
            scheduled.end_replay()
            self._planner.look_again()
        if logprobs is not None:
            logprobs = drop_rows(logprobs, known)
        # A round that also repeated known tokens counts as one with fewer drafts.
        num_left = None if num_drafts is None else max(num_drafts - known, 0)
        return token_ids[known:], num_left, logprobs

    def _take_error(self, plan: StepPlan, error: str) -> None:
        self._planner.lose(plan)
        owners = [self._resources.owners.get(slot) for slot in plan.slots]
        ended = [
            scheduled
            for scheduled, generation in zip(owners, plan.generations, strict=True)
            if scheduled is not None and scheduled.generation == generation
        ]
        copy_ids = {move.copy_id for move in plan.moves if isinstance(move, Copy)}
        self.prefix.prefix_host.drop_copies(copy_ids)
        ended += self._resources.drop_copies(copy_ids)
        for scheduled in ended:
            self._end(scheduled, "error", error)

    def _end(self, scheduled: ScheduledRequest, reason: FinishReason, error: str | None = None) -> None:
        self._outputs.append(cut_short(scheduled.request, reason, error, self._outputs))
        self._finish(scheduled)

    def _finish(self, scheduled: ScheduledRequest) -> None:
        choices = self._live[scheduled.request.request_id]
        choices.remove(scheduled)
        if not choices:
            del self._live[scheduled.request.request_id]
        self._planner.leave(scheduled)
        self._resources.give_back(scheduled)
        self._planner.drop_dead_round()


def _is_new(scheduled: ScheduledRequest) -> bool:
    """Whether a choice waits and has no token."""
    return scheduled.phase is RequestPhase.WAITING and not scheduled.request.output_token_ids
