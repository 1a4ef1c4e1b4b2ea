"""Who leaves when the blocks of the next rounds are not there: the last of those who have a place."""

from __future__ import annotations

from collections.abc import Sequence

from compiled_mtp.plan import BlockUpdate
from compiled_mtp.scheduler.resources import Resources, ScheduledRequest

# Blocks taken beyond what the next launch may write, while there are plenty: most rounds then take none.
_BLOCKS_AHEAD = 8
# Below the blocks of so many rounds of everybody somebody leaves: a copy takes a while.
_ROUNDS_AHEAD = 4


class Preemption:
    """Gives blocks to those who decode and, where they run short, says who is to leave.

    The best of all by rank never leaves, and all blocks together are enough for any one request: it goes on
    to its end, and then the next. So everybody ends.
    """

    def __init__(self, resources: Resources) -> None:
        self._resources = resources
        limits = resources.limits
        self._soon = _ROUNDS_AHEAD * (limits.mtp_step + 1)

    def grow(
        self, decoding: Sequence[tuple[ScheduledRequest, int]]
    ) -> tuple[list[ScheduledRequest], list[BlockUpdate], int]:
        """Give everybody the blocks up to the last position, given beside, that the next round may write.

        Return who has them, the best by rank if not all can; the new block-table entries; and how many blocks
        are missing now or within the next few rounds.
        """
        resources, pool = self._resources, self._resources.pool
        wants = [resources.count_missing(scheduled, last, _BLOCKS_AHEAD) for scheduled, last in decoding]
        if 2 * sum(wants) > pool.num_free:
            needs = [resources.count_missing(scheduled, last) for scheduled, last in decoding]
            spare = pool.num_free - sum(needs)
            if spare < 0:
                return self._share_out(decoding)
            ahead = min(_BLOCKS_AHEAD, spare // (2 * len(decoding)))
            wants = [resources.count_missing(scheduled, last, ahead) for scheduled, last in decoding]
        updates = []
        for (scheduled, _), count in zip(decoding, wants, strict=True):
            if count:
                updates += resources.grow(scheduled, count)
        low = len(decoding) * (self._soon // resources.limits.block_size + 1)
        missing = 0
        if pool.num_free < low:
            soon = (resources.count_missing(scheduled, last + self._soon) for scheduled, last in decoding)
            missing = sum(soon) - pool.num_free
        return [scheduled for scheduled, _ in decoding], updates, missing

    def _share_out(
        self, decoding: Sequence[tuple[ScheduledRequest, int]]
    ) -> tuple[list[ScheduledRequest], list[BlockUpdate], int]:
        """`grow` where not everybody can have what it needs: nobody before somebody of a better rank."""
        ready, updates, missing = [], [], 0
        for scheduled, last in sorted(decoding, key=lambda one: one[0].rank):
            need = self._resources.count_missing(scheduled, last)
            if need and (missing or need > self._resources.pool.num_free):
                missing += need
                continue
            updates += self._resources.grow(scheduled, need)
            ready.append(scheduled)
        return ready, updates, missing - self._resources.pool.num_free

    def choose(self, missing: int) -> ScheduledRequest | None:
        """Who leaves so that `missing` more blocks become free; None if they will be, or if nobody can."""
        if missing <= self._resources.count_leaving():
            return None
        last_first = sorted(self._resources.staying(), key=lambda scheduled: scheduled.rank, reverse=True)
        return next((scheduled for scheduled in last_first[:-1] if scheduled.transfer is None), None)
