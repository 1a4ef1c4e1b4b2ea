"""The requests that wait, and when they are admitted: running ones must keep blocks for their next tokens."""

from __future__ import annotations

from collections.abc import Collection

from compiled_mtp.scheduler.phases import RequestPhase
from compiled_mtp.scheduler.prompts import Prompts
from compiled_mtp.scheduler.resources import Resources
from compiled_mtp.scheduler.scheduled_request import ScheduledRequest
from compiled_mtp.scheduler.waiting_queue import WaitingQueue

# Tokens for which every request must have room when one is admitted; each gains about as many before the next
# preemption.
_TOKENS_AHEAD = 64


class Admission:
    """Admits a request if the free blocks cover its prompt and the next 64 tokens of it and all others.

    No blocks are reserved beyond that: when they run short later, `Preemption` preempts the request of the
    worst rank. Call `reset` before all else. queue: requests to admit: new ones, those to recompute, and
    those that are offloaded or on their way to the host. waiting: the first two kinds, by Request.key.
    """

    def __init__(self, resources: Resources) -> None:
        self._resources = resources
        self.tokens_ahead = _TOKENS_AHEAD
        self.waiting: dict[tuple[str, int], ScheduledRequest] = {}

    def reset(self, prompts: Prompts) -> None:
        """Forget every request that is not waiting; new prompts join `prompts` from now on."""
        self._prompts = prompts
        self.queue = WaitingQueue()
        for scheduled in self.waiting.values():
            scheduled.reset_progress()
            self.queue.add(scheduled)

    def enter(self, scheduled: ScheduledRequest) -> None:
        """Put a request in the waiting queue. May be called again after an interrupt at any point."""
        self.queue.discard(scheduled)
        self.waiting[scheduled.request.key] = scheduled
        self.queue.add(scheduled)

    def leave(self, scheduled: ScheduledRequest) -> None:
        """Remove a request that ends, if it is here."""
        self.queue.discard(scheduled)
        if scheduled.phase is RequestPhase.WAITING:
            # The key is missing if an interrupt stopped `enter`.
            self.waiting.pop(scheduled.request.key, None)

    def hold(self, names: Collection[str]) -> list[ScheduledRequest]:
        """Take the choices of requests out of the waiting queue; return them for `enter`."""
        held = [one for one in self.queue if one.request.request_id in names]
        for scheduled in held:
            self.queue.discard(scheduled)
        return held

    def admit(self) -> None:
        """Admit waiting requests in order while there is room; at most one new prompt.

        Other prompts join it when its launch is planned.
        """
        while (scheduled := self.queue.first()) is not None:
            is_new = scheduled.phase is RequestPhase.WAITING
            if scheduled.transfer is not None:
                # Still being copied to the host; no other request overtakes it.
                return
            if is_new and (self._prompts or self._resources.prefix.is_expected(scheduled)):
                return
            if not self._has_room(scheduled):
                return
            if is_new:
                self._admit_new(scheduled)
            else:
                self.queue.take(scheduled)
                self._resources.resume(scheduled)

    def admit_beside(self, num_rows: int | None) -> ScheduledRequest | None:
        """Admit the next waiting request if its prompt, or for None a part, may share the planned launch."""
        scheduled = self.queue.first()
        if scheduled is None or scheduled.phase is not RequestPhase.WAITING:
            return None
        if not self._prompts.may_join(scheduled, num_rows) or self._resources.prefix.is_expected(scheduled):
            return None
        if not self._has_room(scheduled):
            return None
        self._admit_new(scheduled)
        return scheduled

    def check_integrity(self) -> None:
        """Raise AssertionError unless the phases agree with the waiting queue."""
        assert all(scheduled.phase is RequestPhase.WAITING for scheduled in self.waiting.values())
        away = [one for one in self.queue if one.phase is not RequestPhase.WAITING]
        for one in away:
            assert (one.phase is RequestPhase.OFFLOADED) == (one.transfer is None)
        assert {id(one) for one in self.queue} == {id(one) for one in (*self.waiting.values(), *away)}

    def _admit_new(self, scheduled: ScheduledRequest) -> None:
        self.queue.take(scheduled)
        del self.waiting[scheduled.request.key]
        self._resources.admit(scheduled)
        self._prompts.members.append(scheduled)

    def _has_room(self, scheduled: ScheduledRequest) -> bool:
        """Return whether a slot and enough blocks are free for a waiting or offloaded request."""
        resources, limits = self._resources, self._resources.limits
        if not resources.num_free_slots:
            return False
        is_waiting = scheduled.phase is RequestPhase.WAITING
        # Prefix blocks that other requests already hold cost nothing.
        shared = resources.prefix.count_shared(scheduled) if is_waiting else 0
        needed = resources.first_blocks(scheduled) - shared if is_waiting else len(scheduled.block_ids)
        others = resources.staying()
        if needed > resources.pool.num_free or not others:
            # `Limits.fit` has checked that all blocks are enough for one request alone.
            return needed <= resources.pool.num_free
        # Prompt chunks and rounds alternate: the others decode one round per chunk of this prompt.
        chunk = limits.busy_chunk or limits.prefill_chunk
        # A launch has one snapshot offset. If another prompt takes it, this prompt ends a chunk at each of
        # its two snapshot positions. With the part that fills another launch, up to three chunks more.
        chunks = -(-scheduled.request.prompt_len // chunk) + 3 if is_waiting else 0
        if is_waiting and limits.tower is not None:
            # So do rounds and slices of the vision tower.
            images = scheduled.request.images
            chunks += sum(limits.tower.count_slices(image.span.num_tokens) for image in images)
        # Never less than `Preemption.grow` asks for: else a request that has just come would leave at once.
        rows = (limits.max_in_flight + 2) * (limits.max_drafts + 1)
        rows += chunks * (limits.most_drafts(len(others)) + 1)
        tokens = self.tokens_ahead + rows
        needed = max(needed, self._blocks_soon(scheduled, tokens) - shared)
        # Every other request has the blocks of its tokens, unless it replays them.
        most = len(others) * (limits.blocks_up_to(tokens) + 1)
        if needed + most <= resources.pool.num_free and not any(other.replay for other in others):
            return True
        for other in others:
            needed += max(self._blocks_soon(other, tokens) - len(other.block_ids), 0)
        return needed <= resources.pool.num_free

    def _blocks_soon(self, scheduled: ScheduledRequest, num_tokens: int) -> int:
        """Return the blocks that a request needs after `num_tokens` more tokens, or at its end if sooner."""
        limits, request = self._resources.limits, scheduled.request
        # A replayed request needs the blocks of all its known output tokens again.
        num_output = max(scheduled.num_emitted, len(request.output_token_ids))
        last = request.prompt_len + num_output + num_tokens
        return min(limits.blocks_up_to(last), limits.worst_case_blocks(request))
