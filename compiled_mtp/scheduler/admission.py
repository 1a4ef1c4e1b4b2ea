"""Whether a request that waits may have a place now: if what is running can go on for a while beside it."""

from __future__ import annotations

from compiled_mtp.scheduler.holdings import Holding, Holdings
from compiled_mtp.scheduler.phases import RequestPhase

# What everybody is to have room for when somebody comes: whoever is sent away has gained so many tokens.
_TOKENS_AHEAD = 64


class Admission:
    """Counts blocks: a request comes in if those of its prompt, and those that it and all others need for the
    next 64 tokens, are free.

    Nobody is promised more, so that growth may fail later; then the youngest leaves (`Preemption`). Between
    two times that somebody leaves, everybody gains about 64 tokens.
    """

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = holdings
        self.tokens_ahead = _TOKENS_AHEAD

    def has_room(self, holding: Holding) -> bool:
        """Whether a slot, and blocks enough, are free for a request that waits or lies in host memory."""
        holdings, limits = self._holdings, self._holdings.limits
        if not holdings.has_slot:
            return False
        is_waiting = holding.phase is RequestPhase.WAITING
        # What a prefix shares with those who have a place takes nothing more.
        shared = holdings.prefix.count_held(holding) if is_waiting else 0
        needed = holdings.first_blocks(holding) - shared if is_waiting else len(holding.block_ids)
        others = holdings.staying()
        if needed > holdings.pool.num_free or not others:
            # Alone it may have everything: `Limits.fit` has seen to it that this is enough.
            return needed <= holdings.pool.num_free
        # A chunk and a round take turns.
        chunk = limits.busy_chunk or limits.prefill_chunk
        # Two more: beside others, whose launch has its one mark, a piece may end at each of its two places.
        chunks = -(-holding.request.prompt_len // chunk) + 2 if is_waiting else 0
        rows = (limits.max_in_flight + 2 + chunks) * (limits.mtp_step + 1)
        needed = max(needed, self._blocks_soon(holding, self.tokens_ahead + rows) - shared)
        for other in others:
            needed += max(self._blocks_soon(other, self.tokens_ahead + rows) - len(other.block_ids), 0)
        return needed <= holdings.pool.num_free

    def _blocks_soon(self, holding: Holding, num_tokens: int) -> int:
        """Blocks that a request has, `num_tokens` tokens from now, or at its end."""
        limits, request = self._holdings.limits, holding.request
        # One that is replayed needs soon what it had.
        num_output = max(holding.num_emitted, len(request.output_token_ids))
        last = request.prompt_len + num_output + num_tokens
        return min(limits.blocks_up_to(last), limits.worst_case_blocks(request))
