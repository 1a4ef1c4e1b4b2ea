"""Whether a request that waits may have a place now: if what is running can go on for a while beside it."""

from __future__ import annotations

from compiled_mtp.scheduler.phases import RequestPhase
from compiled_mtp.scheduler.resources import Resources, ScheduledRequest

# What everybody is to have room for when somebody comes: whoever is sent away has gained so many tokens.
_TOKENS_AHEAD = 64


class Admission:
    """Counts blocks: a request comes in if those of its prompt, and those that it and all others need for the
    next 64 tokens, are free.

    Nobody is promised more, so that growth may fail later; then the youngest leaves (`Preemption`). Between
    two times that somebody leaves, everybody gains about 64 tokens.
    """

    def __init__(self, resources: Resources) -> None:
        self._resources = resources
        self.tokens_ahead = _TOKENS_AHEAD

    def has_room(self, scheduled: ScheduledRequest) -> bool:
        """Whether a slot, and blocks enough, are free for a request that waits or lies in host memory."""
        resources, limits = self._resources, self._resources.limits
        if not resources.has_slot:
            return False
        is_waiting = scheduled.phase is RequestPhase.WAITING
        # What a prefix shares with those who have a place takes nothing more.
        shared = resources.prefix.count_shared(scheduled) if is_waiting else 0
        needed = resources.first_blocks(scheduled) - shared if is_waiting else len(scheduled.block_ids)
        others = resources.staying()
        if needed > resources.pool.num_free or not others:
            # Alone it may have everything: `Limits.fit` has seen to it that this is enough.
            return needed <= resources.pool.num_free
        # A chunk and a round take turns.
        chunk = limits.busy_chunk or limits.prefill_chunk
        # Two more: beside others, whose launch has its one mark, a piece may end at each of its two places.
        chunks = -(-scheduled.request.prompt_len // chunk) + 2 if is_waiting else 0
        rows = (limits.max_in_flight + 2 + chunks) * (limits.mtp_step + 1)
        needed = max(needed, self._blocks_soon(scheduled, self.tokens_ahead + rows) - shared)
        for other in others:
            needed += max(self._blocks_soon(other, self.tokens_ahead + rows) - len(other.block_ids), 0)
        return needed <= resources.pool.num_free

    def _blocks_soon(self, scheduled: ScheduledRequest, num_tokens: int) -> int:
        """Blocks that a request has, `num_tokens` tokens from now, or at its end."""
        limits, request = self._resources.limits, scheduled.request
        # One that is replayed needs soon what it had.
        num_output = max(scheduled.num_emitted, len(request.output_token_ids))
        last = request.prompt_len + num_output + num_tokens
        return min(limits.blocks_up_to(last), limits.worst_case_blocks(request))
