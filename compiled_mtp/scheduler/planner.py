"""What is launched next: pieces of prompts, one decode round or half of one, or copies alone.

While prompts and rounds are both waiting they take turns, so prompts delay the others by one launch a round.
Results may arrive `max_in_flight` launches late: a plan depends on what is certain and reserves for
what is possible.

Rounds are planned many times a second: a look at every request tells for how many rounds nothing can end and
every block is reserved, and until then, or until a request comes or goes, a round is planned without another.
While a request is replayed every round is looked at, since each of them brings drafts.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from compiled_mtp.graphs.buckets import NO_DRAFTS, RoundShape
from compiled_mtp.plan import BlockUpdate, Copy, Draft, Move, Place, PlanKind, PromptChunk, StepPlan
from compiled_mtp.request import Request
from compiled_mtp.scheduler.admission import Admission
from compiled_mtp.scheduler.phases import RequestPhase
from compiled_mtp.scheduler.preemption import Preemption
from compiled_mtp.scheduler.prompts import Prompts
from compiled_mtp.scheduler.resources import Resources, ScheduledRequest
from compiled_mtp.scheduler.waiting_queue import WaitingQueue

Depth = Callable[[int, int, bool], int]
"""How many drafts the round that is planned now verifies and leaves, 0 to mtp_step, given its number of
requests, the mean tokens of their contexts when they were last looked at, and whether it runs as two halves;
asked once a round, and once before with no requests."""


class _Wants(NamedTuple):
    """What some requests ask of a launch beside their tokens: halves, a grammar's masks, how many of the
    likeliest ids (-1: no log probabilities), of some the processed ones, and the drafts that it leaves.
    """

    is_two_phase: bool = False
    is_guided: bool = False
    logprobs: int = -1
    has_processed_logprobs: bool = False
    has_drafts: bool = False


@dataclass(slots=True)
class _OpenRound:
    """A round that was planned as far as its logits; its accept is still to come."""

    plan: StepPlan
    members: list[ScheduledRequest]
    wants: _Wants


class Planner:
    """Makes the plans. Slots and blocks are the holdings'; which launches are unread, and whose turn it is,
    is known here.
    """

    def __init__(self, resources: Resources, depth: Depth | None) -> None:
        self.limits = resources.limits
        self.resources = resources
        self.max_prompt_chunks = self.limits.max_prompt_chunks
        self._depth = depth
        self._context_tokens = 0
        # Of the drafts that the launches planned so far leave on the device.
        self._chain = self._choose_depth(0, is_two_phase=False)
        self._admission = Admission(resources)
        self._preemption = Preemption(resources)
        # By Request.key.
        self.waiting: dict[tuple[str, int], ScheduledRequest] = {}
        # Since the planner was made: requests that were sent to the host, and that lost their place.
        self.num_offloaded = 0
        self.num_recomputed = 0
        self._is_prefill_next = True
        self._next_step_id = 0
        self._copy_ids = itertools.count()
        self.reset()

    def reset(self) -> None:
        """Forget every launch and everybody who is not waiting."""
        self.prompts = Prompts(self.resources, self._copy_ids)
        # Whoever waits, and whoever lies in host memory, or is on its way there, and is to come back.
        self.waiting_queue = WaitingQueue()
        for scheduled in self.waiting.values():
            scheduled.forget_place()
            self.waiting_queue.add(scheduled)
        # Planned, and their results not yet taken; results come in the order of the launches.
        self._unread: deque[StepPlan] = deque()
        self._open_round: _OpenRound | None = None
        # The slots of the last round, and the rounds that may follow without a look at each request.
        self.decoding_slots: tuple[int, ...] = ()
        self._decoding_generations: tuple[int, ...] = ()
        self._rounds_ahead = 0
        # Whether the draft has read all that rounds of these slots have kept.
        self._is_caught_up = False
        # Of them those whose tokens are replayed.
        self._replaying: list[ScheduledRequest] = []
        # What the requests of the next rounds ask for.
        self._wants = _Wants()
        # What the next plan carries.
        self._copies: list[Copy] = []
        self._block_updates: list[BlockUpdate] = []
        # A plan was lost, and with it what it would have installed.
        self._is_install_lost = False

    def look_again(self) -> None:
        """Somebody came or went: choose anew who decodes."""
        self._rounds_ahead = 0

    def schedule(self) -> StepPlan | None:
        """Plan the next launch and reserve every block it may write; None if there is nothing to launch."""
        assert len(self._unread) <= self.limits.max_in_flight, f"{len(self._unread)} results are late"
        if self.waiting_queue:
            self._admit()
        if self.resources.moving:
            self._plan_copies()
        if not self._rounds_ahead and self._open_round is None:
            self._look_ahead()
        plan = self._plan_next()
        if plan is not None:
            self._unread.append(plan)
        return plan

    def read(self, plan: StepPlan) -> None:
        """The result of `plan` has come: it must be the oldest that is due."""
        oldest = self._unread[0]
        assert oldest is plan, f"the result of step {oldest.step_id} is due, got {plan.step_id}"
        self._unread.popleft()

    def lose(self, plan: StepPlan) -> None:
        """`plan` ended with an error, maybe before its turn: nobody knows how much of it was installed, and
        the next one says everything again.
        """
        self._unread.remove(plan)
        if self._open_round is not None and self._open_round.plan is plan:
            self._close_round()
        self._is_install_lost = True
        self.look_again()

    def enter(self, scheduled: ScheduledRequest) -> None:
        """A request waits. Interrupted anywhere it can be called again."""
        self.waiting_queue.discard(scheduled)
        self.waiting[scheduled.request.key] = scheduled
        self.waiting_queue.add(scheduled)

    def finish_copies(self, copy_ids: Collection[int]) -> None:
        """These copies are complete."""
        for scheduled in list(self.resources.moving):
            if scheduled.transfer is not None and scheduled.transfer.copy_id in copy_ids:
                self.resources.finish_transfer(scheduled)
        self.resources.prefix.prefix_host.finish_copies(copy_ids)
        self.look_again()

    def cancel_copies(self, copy_ids: Collection[int]) -> None:
        """There is no memory for these copies: their requests go on where they are."""
        for scheduled in self.resources.cancel_copies(copy_ids):
            self.waiting_queue.discard(scheduled)
        self.resources.prefix.prefix_host.cancel_copies(copy_ids)
        self.look_again()

    def leave(self, scheduled: ScheduledRequest) -> None:
        """A request ends: nothing more is planned for it."""
        self.waiting_queue.discard(scheduled)
        if scheduled.phase is RequestPhase.WAITING:
            self.waiting.pop(scheduled.request.key, None)  # It was being entered when an interrupt came.
        elif not self.prompts.leave(scheduled):
            self.look_again()

    def drop_dead_round(self) -> None:
        """A round whose members have all ended is not accepted: nobody would read its tokens."""
        members = [] if self._open_round is None else self._open_round.members
        if members and all(scheduled.phase is RequestPhase.FINISHED for scheduled in members):
            self._close_round()

    def check_integrity(self) -> None:
        """Raise AssertionError unless phases agree with who waits, who prefills and who is in a round."""
        assert all(scheduled.phase is RequestPhase.WAITING for scheduled in self.waiting.values())
        away = [one for one in self.waiting_queue if one.phase is not RequestPhase.WAITING]
        for one in away:
            assert (one.phase is RequestPhase.OFFLOADED) == (one.transfer is None)
        assert {id(one) for one in self.waiting_queue} == {id(one) for one in (*self.waiting.values(), *away)}
        owners = self.resources.owners.values()
        prefilling = [scheduled for scheduled in owners if scheduled.phase is RequestPhase.PREFILLING]
        assert {id(one) for one in prefilling} == {id(one) for one in self.prompts.members}
        assert len(prefilling) == len(self.prompts.members)
        members = [] if self._open_round is None else self._open_round.members
        assert all(scheduled.is_in_open_round for scheduled in members)
        assert all(scheduled in members for scheduled in owners if scheduled.is_in_open_round)

    def _admit(self) -> None:
        """Give places to those who come next, as long as there are any; to one prompt, which others join when
        its launch is planned."""
        while (scheduled := self.waiting_queue.first()) is not None:
            is_new = scheduled.phase is RequestPhase.WAITING
            if scheduled.transfer is not None:
                return  # Still on its way out: nobody passes it meanwhile.
            if is_new and (self.prompts or self.resources.prefix.is_expected(scheduled)):
                return
            if not self._admission.has_room(scheduled):
                return
            if is_new:
                self._admit_new(scheduled)
            else:
                self.waiting_queue.take(scheduled)
                self.resources.resume(scheduled)

    def _admit_new(self, scheduled: ScheduledRequest) -> None:
        self.waiting_queue.take(scheduled)
        del self.waiting[scheduled.request.key]
        self.resources.admit(scheduled)
        self.prompts.members.append(scheduled)

    def _admit_beside(self, num_rows: int) -> ScheduledRequest | None:
        """Give a place to who comes next if its prompt may share the launch that is planned."""
        scheduled = self.waiting_queue.first()
        if scheduled is None or scheduled.phase is not RequestPhase.WAITING:
            return None
        if not self.prompts.may_join(scheduled, num_rows) or self.resources.prefix.is_expected(scheduled):
            return None
        if not self._admission.has_room(scheduled):
            return None
        self._admit_new(scheduled)
        return scheduled

    def _preempt(self, scheduled: ScheduledRequest) -> None:
        """Send a request away: to the host if there is room, else to wait and to be replayed."""
        records, blocks = self.resources.host_room()
        if scheduled.phase is RequestPhase.RUNNING and records and len(scheduled.block_ids) <= blocks:
            self.num_offloaded += 1
            self.resources.offload(scheduled)
            self.waiting_queue.add(scheduled)
            return
        self.num_recomputed += 1
        self._block_updates = [update for update in self._block_updates if update.slot != scheduled.slot]
        self.prompts.leave(scheduled)
        if scheduled.request.guide is not None:
            scheduled.request.guide.reset()
        self.resources.preempt(scheduled)
        self.enter(scheduled)

    def _plan_copies(self) -> None:
        """Plan the copy of everybody on the move whose last launch has been read."""
        unread = self._count_unread_rounds()
        for scheduled in self.resources.moving:
            is_read = not (scheduled.is_first_token_due or unread[scheduled.slot, scheduled.generation])
            if is_read and scheduled.transfer is not None and scheduled.transfer.copy_id is None:
                copy, row = self.resources.plan_copy(scheduled, next(self._copy_ids))
                self._copies.append(copy)
                self._block_updates += row

    def _look_ahead(self) -> None:
        """Choose who decodes, reserve the blocks of their next rounds, and count these."""
        while True:
            unread = self._count_unread_rounds()
            in_flight = {one.slot: unread[one.slot, one.generation] for one in self._decoding(unread)}
            owners = self.resources.owners
            last_writes = [(owners[slot], self._last_write(owners[slot], n)) for slot, n in in_flight.items()]
            decoding, updates, missing = self._preemption.grow(last_writes)
            self._block_updates += updates
            leaving = self._preemption.choose(missing) if missing > 0 else None
            if leaving is None:
                break
            self._preempt(leaving)
        self._wants = _wants([scheduled.request for scheduled in decoding])
        self._replaying = [scheduled for scheduled in decoding if scheduled.replay is not None]
        self.decoding_slots = tuple(scheduled.slot for scheduled in decoding)
        self._decoding_generations = tuple(scheduled.generation for scheduled in decoding)
        self._is_caught_up = False
        tokens = sum(one.request.prompt_len + len(one.request.output_token_ids) for one in decoding)
        self._context_tokens = tokens // max(len(decoding), 1)
        # The one that is planned next was looked at itself. Whoever sits out is looked for at every round.
        is_short = self._replaying or len(decoding) < len(in_flight)
        rounds = [1] if is_short else [self._certain_rounds(one, in_flight[one.slot]) for one in decoding]
        self._rounds_ahead = max(min(rounds), 1) if decoding else 0

    def _decoding(self, unread: Counter[tuple[int, int]]) -> Iterator[ScheduledRequest]:
        """Those who have a prompt behind them and a token to come."""
        for scheduled in self.resources.owners.values():
            if scheduled.phase is RequestPhase.RUNNING and scheduled.transfer is None:
                output = _least_output(scheduled, unread[scheduled.slot, scheduled.generation])
                if output < scheduled.request.max_output:
                    yield scheduled

    def _count_unread_rounds(self) -> Counter[tuple[int, int]]:
        """Rounds whose results are not yet taken, by slot and generation."""
        rounds = [plan for plan in self._unread if plan.kind in ("decode", "accept")]
        if self._open_round is not None:
            rounds.append(self._open_round.plan)
        return Counter(owner for plan in rounds for owner in zip(plan.slots, plan.generations, strict=True))

    def _has_unread_guides(self, members: Sequence[ScheduledRequest]) -> bool:
        """Whether tokens that a grammar is to take are still to be read."""
        guided = {(one.slot, one.generation) for one in members if one.request.guide is not None}
        givers = [plan for plan in self._unread if plan.kind in ("first", "accept")]
        return any(not guided.isdisjoint(zip(p.slots, p.generations, strict=True)) for p in givers)

    def _certain_rounds(self, scheduled: ScheduledRequest, in_flight: int) -> int:
        """Rounds from now on that cannot be the request's last one and have their blocks."""
        width, request = self.limits.mtp_step + 1, scheduled.request
        # Each result may be read before the next launch.
        most_output = _least_output(scheduled, in_flight) + in_flight * self.limits.mtp_step
        rounds = -((most_output - request.max_output) // width)
        owned = len(scheduled.block_ids)
        if owned < self.limits.worst_case_blocks(request):
            last_write = self._last_write(scheduled, in_flight)
            rounds = min(rounds, (owned * self.limits.block_size - 1 - last_write) // width + 1)
        return rounds

    def _last_write(self, scheduled: ScheduledRequest, in_flight: int) -> int:
        """Last position a round may write after `in_flight` unread ones: verify rows, then the chain."""
        request, mtp_step = scheduled.request, self.limits.mtp_step
        # The first token, known or not, stands right after the prompt; others are known when they are read.
        pos = request.prompt_len + max(scheduled.num_emitted - 1, 0)
        return pos + in_flight * (mtp_step + 1) + 2 * mtp_step

    def _plan_next(self) -> StepPlan | None:
        if (prefilled := self.prompts.next_prefilled()) is not None:
            return self._plan_first(prefilled)
        has_round = self._open_round is not None or bool(self.decoding_slots)
        if self.prompts and (self._is_prefill_next or not has_round):
            self._is_prefill_next = False
            return self._plan_prefill()
        if self._open_round is not None:
            # Masks follow from the tokens of the round before: its result is waited for, not planned around.
            opened = self._open_round
            is_early = opened.wants.is_guided and self._has_unread_guides(opened.members)
            return None if is_early else self._plan_accept(opened)
        self._is_prefill_next = True
        if has_round:
            return self._plan_round()
        # With copies alone under way a plan without a launch gives the next step a result to wait for.
        is_copying = any(scheduled.is_pinned for scheduled in self.resources.moving)
        if self._copies or (is_copying and not self._unread):
            return self._make_plan("move")
        return None

    def _plan_prefill(self) -> StepPlan:
        self._restore_install()
        has_round = self._open_round is not None or bool(self.decoding_slots)
        most = self.limits.busy_chunk if has_round else 0
        most = most or self.limits.prefill_chunk
        launch = self.prompts.plan(most, self.max_prompt_chunks, self._admit_beside)
        self._block_updates += launch.block_updates
        for scheduled in launch.ended:
            self._end_prefill(scheduled)
        return self._make_plan(
            "prefill",
            tuple(scheduled.slot for scheduled in launch.members),
            tuple(scheduled.generation for scheduled in launch.members),
            launch.moves,
            shape=RoundShape(0, self._chain if launch.ended else 0),
            prompt_chunks=tuple(launch.prompt_chunks),
            wants_drafts=any(scheduled.request.params.include_drafts for scheduled in launch.ended),
            saves=tuple(launch.saves),
        )

    def _plan_spills(self) -> list[Copy]:
        """Copies of what the prefix cache has given up since the last plan, to its host tier: before anything
        else is written where it lies.
        """
        copies, prefix_host = [], self.resources.prefix.prefix_host
        for eviction in prefix_host.take_evictions():
            source, target = (
                Place("snapshot", eviction.snapshot or 0),
                Place("prefix_host", eviction.record or 0),
            )
            copy = self.prompts.copy(source, target, eviction.blocks, has_rows=eviction.record is not None)
            prefix_host.begin(eviction, copy.copy_id)
            copies.append(copy)
        return copies

    def _plan_first(self, scheduled: ScheduledRequest) -> StepPlan:
        """The first token of a prompt whose last piece is planned."""
        self._end_prefill(scheduled)
        wants = _wants([scheduled.request])
        return self._make_plan(
            "first",
            (scheduled.slot,),
            (scheduled.generation,),
            shape=RoundShape(0, self._chain),
            logprobs=wants.logprobs,
            has_processed_logprobs=wants.has_processed_logprobs,
            is_guided=wants.is_guided,
            wants_drafts=wants.has_drafts,
        )

    def _end_prefill(self, scheduled: ScheduledRequest) -> None:
        scheduled.is_first_token_due = True
        if scheduled.replay is not None:
            scheduled.replay.plan_first()
        scheduled.enter(RequestPhase.RUNNING)
        self.prompts.leave(scheduled)
        self.look_again()

    def _plan_round(self) -> StepPlan:
        self._rounds_ahead -= 1
        is_two_phase = self._wants.is_two_phase
        depth = self._choose_depth(len(self.decoding_slots), is_two_phase=is_two_phase)
        # Whoever came back from elsewhere may have other drafts; statistics alone know of it.
        num_drafts, self._chain = min(depth, self._chain), depth
        plan = self._make_plan(
            "verify" if is_two_phase else "decode",
            self.decoding_slots,
            self._decoding_generations,
            [upload for one in self._replaying for upload in _known_drafts(one, depth)],
            shape=RoundShape(depth, depth),
            num_drafts=num_drafts,
            catches_up=self._catches_up(depth),
            wants_drafts=self._wants.has_drafts and not is_two_phase,
        )
        if is_two_phase:
            members = [self.resources.owners[slot] for slot in plan.slots]
            for scheduled in members:
                scheduled.is_in_open_round = True
            self._open_round = _OpenRound(plan, members, self._wants)
        return plan

    def _plan_accept(self, opened: _OpenRound) -> StepPlan:
        first = opened.plan
        plan = self._make_plan(
            "accept",
            first.slots,
            first.generations,
            shape=first.shape,
            num_drafts=first.num_drafts,
            logprobs=opened.wants.logprobs,
            has_processed_logprobs=opened.wants.has_processed_logprobs,
            is_guided=opened.wants.is_guided,
            wants_drafts=opened.wants.has_drafts,
        )
        # What ended in between is released with a later plan: moves go before the launch.
        self._close_round()
        return plan

    def _close_round(self) -> None:
        assert self._open_round is not None
        for scheduled in self._open_round.members:
            scheduled.is_in_open_round = False
        self._open_round = None
        self.resources.sweep()

    def _make_plan(
        self,
        kind: PlanKind,
        slots: tuple[int, ...] = (),
        generations: tuple[int, ...] = (),
        own_moves: Sequence[Move] = (),
        *,
        shape: RoundShape = NO_DRAFTS,
        num_drafts: int = 0,
        catches_up: bool = False,
        prompt_chunks: tuple[PromptChunk, ...] = (),
        logprobs: int = -1,
        has_processed_logprobs: bool = False,
        is_guided: bool = False,
        wants_drafts: bool = False,
        saves: tuple[Copy, ...] = (),
    ) -> StepPlan:
        self._restore_install()
        evictions = self._plan_spills()
        moves: tuple[Move, ...] = (*evictions, *self.resources.take_releases(), *own_moves, *self._copies)
        block_updates = tuple(self._block_updates)
        self._copies, self._block_updates = [], []
        self._next_step_id += 1
        return StepPlan(
            step_id=self._next_step_id - 1,
            kind=kind,
            slots=slots,
            generations=generations,
            shape=shape,
            num_drafts=num_drafts,
            catches_up=catches_up,
            prompt_chunks=prompt_chunks,
            moves=moves,
            block_updates=block_updates,
            logprobs=logprobs,
            has_processed_logprobs=has_processed_logprobs,
            is_guided=is_guided,
            wants_drafts=wants_drafts,
            saves=saves,
        )

    def _restore_install(self) -> None:
        """After a lost plan: say again who owns nothing and who owns which blocks."""
        if self._is_install_lost:
            self.resources.forget_what_was_told({copy.copy_id for copy in self._copies})
            self._block_updates = self.resources.all_block_updates()
            self._is_install_lost = False

    def _catches_up(self, depth: int) -> bool:
        """Whether the draft must catch up before a round of that depth; counts the inputs that it defers."""
        if not self.limits.mtp_step or (depth and self._is_caught_up):
            return False
        members = [self.resources.owners[slot] for slot in self.decoding_slots]
        most_deferred = max(scheduled.num_deferred for scheduled in members)
        # A slot has room for the deferred inputs of mtp_step + 1 rounds.
        catches_up = most_deferred > (0 if depth else self.limits.mtp_step)
        for scheduled in members:
            scheduled.num_deferred = (0 if catches_up else scheduled.num_deferred) + (not depth)
        self._is_caught_up = depth > 0
        return catches_up

    def _choose_depth(self, num_requests: int, *, is_two_phase: bool) -> int:
        mtp_step = self.limits.mtp_step
        depth = (
            mtp_step if self._depth is None else self._depth(num_requests, self._context_tokens, is_two_phase)
        )
        if not 0 <= depth <= mtp_step:
            raise ValueError(f"depth must lie in 0..{mtp_step} (mtp_step), got {depth}; choose another")
        return depth


def _wants(requests: Sequence[Request]) -> _Wants:
    has_drafts = any(request.params.include_drafts for request in requests)
    two_phase = [request for request in requests if request.is_two_phase]
    if not two_phase:
        return _Wants(has_drafts=has_drafts)
    listed = max(-1 if (most := request.params.logprobs) is None else most for request in two_phase)
    is_guided = any(request.guide is not None for request in two_phase)
    has_processed = any(request.has_processed_logprobs for request in two_phase)
    return _Wants(True, is_guided, listed, has_processed, has_drafts=has_drafts or is_guided)


def _known_drafts(scheduled: ScheduledRequest, verify: int) -> Iterator[Draft]:
    """The known tokens that a replayed request's next round is to verify."""
    if scheduled.replay is not None and (known := scheduled.replay.plan_round(verify)):
        yield Draft(scheduled.slot, tuple(known))


def _least_output(scheduled: ScheduledRequest, in_flight: int) -> int:
    """Tokens the request will have for certain: every unread round emits one at least."""
    return scheduled.num_emitted + scheduled.is_first_token_due + in_flight
