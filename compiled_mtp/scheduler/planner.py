"""Plans the next launch: a slice of the vision tower, prompt chunks, one decode round or one phase of it, or
copies alone.

While both prompts and rounds wait, their launches alternate, so prompts delay decoding by one launch per
round. Results may arrive `max_in_flight` launches late: a plan depends only on what is certain, and reserves
blocks for what is possible.

Rounds are planned many times per second, so the planner examines the requests once for several rounds: it
counts the rounds in which no request can end, and reserves their blocks. It examines them again after these
rounds, or when a request comes or goes; while the next tokens of a request are known, because it is replayed
or its output is given, at every round, because each of its rounds brings known tokens as drafts.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from compiled_mtp.graphs.buckets import NO_DRAFTS, RoundShape
from compiled_mtp.plan import (
    BlockUpdate,
    Copy,
    EncodeSlice,
    Location,
    Move,
    PlanKind,
    PromptChunk,
    StepPlan,
)
from compiled_mtp.scheduler.admission import Admission
from compiled_mtp.scheduler.look_ahead import certain_rounds, find_decoding
from compiled_mtp.scheduler.phases import RequestPhase
from compiled_mtp.scheduler.preemption import Preemption
from compiled_mtp.scheduler.prompts import Prompts
from compiled_mtp.scheduler.resources import Resources
from compiled_mtp.scheduler.round_shapes import Depth, RoundShapes, Widen
from compiled_mtp.scheduler.scheduled_request import ScheduledRequest
from compiled_mtp.scheduler.wants import NOTHING, Wants, wants_of

# While rounds wait, launches have twice the rows from this many prompts on, and again twice as many with each
# doubling of the prompts.
_FEW_PROMPTS = 8


@dataclass(slots=True)
class _OpenRound:
    """A two-phase round whose verify is planned and whose accept is not."""

    plan: StepPlan
    members: list[ScheduledRequest]
    wants: Wants


class Planner:
    """Makes the plans.

    `Resources` owns slots and blocks; the planner tracks the launches whose results are unread, and whether
    prompts or rounds are next.
    """

    def __init__(self, resources: Resources, depth: Depth | None, widen: Widen | None = None) -> None:
        self.limits = resources.limits
        self.resources = resources
        self._shapes = RoundShapes(self.limits, depth, widen)
        self.admission = Admission(resources)
        self._preemption = Preemption(resources)
        # Preemptions so far: offloads, and requests that lost slot and blocks to be recomputed.
        self.num_offloaded = 0
        self.num_recomputed = 0
        self._is_prefill_next = True
        self._next_step_id = 0
        self._copy_ids = itertools.count()
        self.reset()

    def reset(self) -> None:
        """Forget every launch, and every request that is not waiting."""
        self.prompts = Prompts(self.resources, self._copy_ids)
        self.admission.reset(self.prompts)
        # Plans whose results were not read yet; results come in the order of the launches.
        self._unread: deque[StepPlan] = deque()
        self._open_round: _OpenRound | None = None
        # The slots of the last round, and how many rounds may follow before the requests are examined again.
        self.decoding_slots: tuple[int, ...] = ()
        self._decoding_generations: tuple[int, ...] = ()
        self._rounds_ahead = 0
        self._shapes.examine(())
        # The decoding requests whose next tokens are known.
        self._with_known: list[ScheduledRequest] = []
        # What the requests of the next rounds need.
        self._wants = NOTHING
        # Copies and block-table entries for the next plan.
        self._copies: list[Copy] = []
        self._block_updates: list[BlockUpdate] = []
        # A plan was lost: the next one installs everything again.
        self._is_install_lost = False

    def look_again(self) -> None:
        """Examine the requests again before the next round: one has come or gone."""
        self._rounds_ahead = 0

    def schedule(self) -> StepPlan | None:
        """Plan the next launch and reserve every block it may write; None if there is nothing to launch."""
        assert len(self._unread) <= self.limits.max_in_flight, f"{len(self._unread)} results are late"
        self.admission.admit()
        if self.resources.moving:
            self._plan_copies()
        if not self._rounds_ahead and self._open_round is None:
            self._look_ahead()
        plan = self._plan_next()
        if plan is not None:
            self._unread.append(plan)
        return plan

    def read(self, plan: StepPlan) -> None:
        """Count the result of `plan` as read; it must be the oldest that is due."""
        oldest = self._unread[0]
        assert oldest is plan, f"the result of step {oldest.step_id} is due, got {plan.step_id}"
        self._unread.popleft()

    def lose(self, plan: StepPlan) -> None:
        """Drop `plan`, which ended with an error, maybe out of order.

        How much of it was installed is unknown, so the next plan installs everything again.
        """
        self._unread.remove(plan)
        if self._open_round is not None and self._open_round.plan is plan:
            self._close_round()
        self._is_install_lost = True
        self.look_again()

    def finish_copies(self, copy_ids: Collection[int]) -> None:
        """Finish the transfers and evictions of complete copies."""
        for scheduled in list(self.resources.moving):
            if scheduled.transfer is not None and scheduled.transfer.copy_id in copy_ids:
                self.resources.finish_transfer(scheduled)
        self.resources.prefix.prefix_host.finish_copies(copy_ids)
        self.look_again()

    def cancel_copies(self, copy_ids: Collection[int]) -> None:
        """Cancel copies for which there is no memory; their requests stay where they are."""
        for scheduled in self.resources.cancel_copies(copy_ids):
            self.admission.queue.discard(scheduled)
        self.resources.prefix.prefix_host.cancel_copies(copy_ids)
        self.look_again()

    @property
    def has_unread(self) -> bool:
        """Whether results of launches are still unread."""
        return bool(self._unread)

    def leave(self, scheduled: ScheduledRequest) -> None:
        """Plan nothing more for a request that ends."""
        self.admission.leave(scheduled)
        if scheduled.phase is not RequestPhase.WAITING and not self.prompts.leave(scheduled):
            self.look_again()

    def drop_dead_round(self) -> None:
        """Close the open round without an accept if all its requests have ended."""
        members = [] if self._open_round is None else self._open_round.members
        if members and all(scheduled.phase is RequestPhase.FINISHED for scheduled in members):
            self._close_round()

    def check_integrity(self) -> None:
        """Raise AssertionError unless phases agree with the waiting queue, the prompts and the open round."""
        self.admission.check_integrity()
        owners = self.resources.owners.values()
        prefilling = [scheduled for scheduled in owners if scheduled.phase is RequestPhase.PREFILLING]
        assert {id(one) for one in prefilling} == {id(one) for one in self.prompts.members}
        assert len(prefilling) == len(self.prompts.members)
        members = [] if self._open_round is None else self._open_round.members
        assert all(scheduled.is_in_open_round for scheduled in members)
        assert all(scheduled in members for scheduled in owners if scheduled.is_in_open_round)

    def _preempt(self, scheduled: ScheduledRequest) -> None:
        """Offload a request to the host if there is room, else put it back in the queue to be recomputed."""
        records, blocks = self.resources.host_room()
        if scheduled.phase is RequestPhase.RUNNING and records and len(scheduled.block_ids) <= blocks:
            self.num_offloaded += 1
            self.resources.offload(scheduled)
            self.admission.queue.add(scheduled)
            return
        self.num_recomputed += 1
        self._block_updates = [update for update in self._block_updates if update.slot != scheduled.slot]
        self.prompts.leave(scheduled)
        if scheduled.request.guide is not None:
            scheduled.request.guide.reset()
        self.resources.preempt(scheduled)
        self.admission.enter(scheduled)

    def _plan_copies(self) -> None:
        """Plan the copies of moving requests whose last results have been read."""
        unread = self._count_unread_rounds()
        for scheduled in self.resources.moving:
            is_read = not (scheduled.is_first_token_due or unread[scheduled.slot, scheduled.generation])
            if is_read and scheduled.transfer is not None and scheduled.transfer.copy_id is None:
                copy, row = self.resources.plan_copy(scheduled, next(self._copy_ids))
                self._copies.append(copy)
                self._block_updates += row

    def _look_ahead(self) -> None:
        """Choose the requests that decode, reserve blocks for their next rounds, and count these rounds."""
        while True:
            found = find_decoding(self.resources, self._count_unread_rounds())
            decoding, updates, missing = self._preemption.grow(
                [(one.scheduled, one.last_write) for one in found]
            )
            self._block_updates += updates
            leaving = self._preemption.choose(missing) if missing > 0 else None
            if leaving is None:
                break
            self._preempt(leaving)
        self._wants = wants_of([scheduled.request for scheduled in decoding])
        self._with_known = [scheduled for scheduled in decoding if scheduled.known is not None]
        self.decoding_slots = tuple(scheduled.slot for scheduled in decoding)
        self._decoding_generations = tuple(scheduled.generation for scheduled in decoding)
        self._shapes.examine(decoding)
        # At least 1: the next round's blocks are reserved. One at a time while a request lacks blocks or its
        # next tokens are known.
        is_short = self._with_known or len(decoding) < len(found)
        rounds = [1] if is_short else [certain_rounds(self.limits, one) for one in found]
        self._rounds_ahead = max(min(rounds), 1) if decoding else 0

    def _count_unread_rounds(self) -> Counter[tuple[int, int]]:
        """Count the rounds with unread results, by slot and generation."""
        rounds = [plan for plan in self._unread if plan.kind in ("decode", "accept")]
        if self._open_round is not None:
            rounds.append(self._open_round.plan)
        return Counter(owner for plan in rounds for owner in zip(plan.slots, plan.generations, strict=True))

    def _has_unread_guides(self, members: Sequence[ScheduledRequest]) -> bool:
        """Return whether tokens that a member's grammar must take are still unread."""
        guided = {(one.slot, one.generation) for one in members if one.request.guide is not None}
        givers = [plan for plan in self._unread if plan.kind in ("first", "accept")]
        return any(not guided.isdisjoint(zip(p.slots, p.generations, strict=True)) for p in givers)

    def _plan_next(self) -> StepPlan | None:
        if (prefilled := self.prompts.next_prefilled()) is not None:
            return self._plan_first(prefilled)
        has_round = self._open_round is not None or bool(self.decoding_slots)
        if self.prompts and (self._is_prefill_next or not has_round):
            self._is_prefill_next = False
            return self._plan_prefill()
        if self._open_round is not None:
            # Masks depend on the tokens of the last round, so wait for its result.
            opened = self._open_round
            is_early = opened.wants.is_guided and self._has_unread_guides(opened.members)
            return None if is_early else self._plan_accept(opened)
        self._is_prefill_next = True
        if has_round:
            return self._plan_round()
        # If only copies are under way, a plan without a launch gives the next step a result to wait for.
        is_copying = any(scheduled.is_pinned for scheduled in self.resources.moving)
        if self._copies or (is_copying and not self._unread):
            return self._make_plan("move")
        return None

    def _plan_prefill(self) -> StepPlan:
        self._restore_install()
        most = self._most_rows()
        first = self.prompts.members[0]
        if (encoded := self.prompts.next_slice(most)) is not None:
            return self._make_plan("encode", (first.slot,), (first.generation,), encoded=encoded)
        launch = self.prompts.plan(most, self.limits.max_prompt_chunks, self.admission.admit_beside)
        self._block_updates += launch.block_updates
        for scheduled in launch.ended:
            self._end_prefill(scheduled)
        return self._make_plan(
            "prefill",
            tuple(scheduled.slot for scheduled in launch.members),
            tuple(scheduled.generation for scheduled in launch.members),
            launch.moves,
            shape=RoundShape(0, self._shapes.chain if launch.ended else 0),
            prompt_chunks=tuple(launch.prompt_chunks),
            wants=Wants(has_drafts=any(one.request.params.include_drafts for one in launch.ended)),
            saves=tuple(launch.saves),
        )

    def _most_rows(self) -> int:
        """Return the most rows of the next launch of prompts.

        While rounds wait for it, they are few; but with many prompts to start, rounds would be small and wait
        often, and the last prompts would wait longest.
        """
        limits = self.limits
        has_round = self._open_round is not None or bool(self.decoding_slots)
        if not has_round or not limits.busy_chunk:
            return limits.prefill_chunk
        starting = len(self.prompts.members) + min(len(self.admission.queue), self.resources.num_free_slots)
        doublings = (starting // _FEW_PROMPTS).bit_length()
        return min(limits.busy_chunk << doublings, limits.prefill_chunk)

    def _plan_evictions(self) -> list[Copy]:
        """Return the copies to the host tier of what the prefix cache evicted after the last plan.

        They are a plan's first moves: later ones, or the launch, may overwrite what they read.
        """
        copies, prefix_host = [], self.resources.prefix.prefix_host
        for eviction in prefix_host.take_evictions():
            source = Location("snapshot", eviction.snapshot or 0)
            target = Location("prefix_host", eviction.record or 0)
            copy = self.prompts.copy(source, target, eviction.blocks, has_rows=eviction.record is not None)
            prefix_host.begin(eviction, copy.copy_id)
            copies.append(copy)
        return copies

    def _plan_first(self, scheduled: ScheduledRequest) -> StepPlan:
        """Plan the first token of a two-phase request whose last prompt chunk is planned."""
        self._end_prefill(scheduled)
        return self._make_plan(
            "first",
            (scheduled.slot,),
            (scheduled.generation,),
            shape=RoundShape(0, self._shapes.chain),
            wants=wants_of([scheduled.request]),
        )

    def _end_prefill(self, scheduled: ScheduledRequest) -> None:
        scheduled.is_first_token_due = True
        if scheduled.known is not None:
            scheduled.known.plan_first()
        scheduled.enter(RequestPhase.RUNNING)
        self.prompts.leave(scheduled)
        self.look_again()

    def _plan_round(self) -> StepPlan:
        self._rounds_ahead -= 1
        is_two_phase, chosen = self._wants.is_two_phase, self._shapes.choose(self._wants)
        plan = self._make_plan(
            "verify" if is_two_phase else "decode",
            self.decoding_slots,
            self._decoding_generations,
            [upload for one in self._with_known for upload in one.known_drafts(chosen.shape.verify)],
            shape=chosen.shape,
            num_drafts=chosen.num_drafts,
            catches_up=chosen.catches_up,
            wants=NOTHING if is_two_phase else self._wants,
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
            wants=opened.wants,
        )
        # Closed after the plan is made: moves run before the launch, so requests that ended in between are
        # released with a later plan.
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
        wants: Wants = NOTHING,
        saves: tuple[Copy, ...] = (),
        encoded: EncodeSlice | None = None,
    ) -> StepPlan:
        self._restore_install()
        evictions = self._plan_evictions()
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
            logprobs=wants.logprobs,
            has_processed_logprobs=wants.has_processed_logprobs,
            is_guided=wants.is_guided,
            wants_drafts=wants.has_drafts,
            is_given=wants.are_all_given,
            saves=saves,
            encoded=encoded,
        )

    def _restore_install(self) -> None:
        """After a lost plan, repeat the releases of free slots and the block tables of all others."""
        if self._is_install_lost:
            self.resources.release_again({copy.copy_id for copy in self._copies})
            self._block_updates = self.resources.all_block_updates()
            self._is_install_lost = False
