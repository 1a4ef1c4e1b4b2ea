"""Who leaves when the blocks of the next rounds are not there: the last of those who have a place."""

from __future__ import annotations

from collections.abc import Sequence

from compiled_mtp.plan import BlockUpdate
from compiled_mtp.scheduler.holdings import Holding, Holdings

# Blocks taken beyond what the next launch may write, while there are plenty: most rounds then take none.
_BLOCKS_AHEAD = 8
# Below the blocks of so many rounds of everybody somebody leaves: a copy takes a while.
_ROUNDS_AHEAD = 4


class Preemption:
    """Gives blocks to those who decode and, where they run short, says who is to leave.

    The best of all by rank never leaves, and all blocks together are enough for any one request: it goes on
    to its end, and then the next. So everybody ends.
    """

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = holdings
        limits = holdings.limits
        self._soon = _ROUNDS_AHEAD * (limits.mtp_step + 1)

    def grow(self, decoding: Sequence[tuple[Holding, int]]) -> tuple[list[Holding], list[BlockUpdate], int]:
        """Give everybody the blocks up to the last position, given beside, that the next round may write.

        Return who has them, the best by rank if not all can; the new block-table entries; and how many blocks
        are missing now or within the next few rounds.
        """
        holdings, pool = self._holdings, self._holdings.pool
        wants = [holdings.count_missing(holding, last, _BLOCKS_AHEAD) for holding, last in decoding]
        if 2 * sum(wants) > pool.num_free:
            needs = [holdings.count_missing(holding, last) for holding, last in decoding]
            spare = pool.num_free - sum(needs)
            if spare < 0:
                return self._share_out(decoding)
            ahead = min(_BLOCKS_AHEAD, spare // (2 * len(decoding)))
            wants = [holdings.count_missing(holding, last, ahead) for holding, last in decoding]
        updates = []
        for (holding, _), count in zip(decoding, wants, strict=True):
            if count:
                updates += holdings.grow(holding, count)
        low = len(decoding) * (self._soon // holdings.limits.block_size + 1)
        missing = 0
        if pool.num_free < low:
            soon = (holdings.count_missing(holding, last + self._soon) for holding, last in decoding)
            missing = sum(soon) - pool.num_free
        return [holding for holding, _ in decoding], updates, missing

    def _share_out(
        self, decoding: Sequence[tuple[Holding, int]]
    ) -> tuple[list[Holding], list[BlockUpdate], int]:
        """`grow` where not everybody can have what it needs: nobody before somebody of a better rank."""
        ready, updates, missing = [], [], 0
        for holding, last in sorted(decoding, key=lambda one: one[0].rank):
            need = self._holdings.count_missing(holding, last)
            if need and (missing or need > self._holdings.pool.num_free):
                missing += need
                continue
            updates += self._holdings.grow(holding, need)
            ready.append(holding)
        return ready, updates, missing - self._holdings.pool.num_free

    def choose(self, missing: int) -> Holding | None:
        """Who leaves so that `missing` more blocks become free; None if they will be, or if nobody can."""
        if missing <= self._holdings.count_leaving():
            return None
        last_first = sorted(self._holdings.staying(), key=lambda holding: holding.rank, reverse=True)
        return next((holding for holding in last_first[:-1] if holding.transfer is None), None)
