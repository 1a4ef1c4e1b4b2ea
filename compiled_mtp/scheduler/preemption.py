"""Gives decoding requests their next blocks, and chooses which request to preempt when blocks run short."""

from __future__ import annotations

from collections.abc import Sequence

from compiled_mtp.plan import BlockUpdate
from compiled_mtp.scheduler.resources import Resources
from compiled_mtp.scheduler.scheduled_request import ScheduledRequest

# Blocks given beyond what the next launch may write, while many are free: most rounds then allocate none.
_BLOCKS_AHEAD = 8
# Preempt when free blocks cover fewer rounds of all requests: the copy to the host is asynchronous.
_ROUNDS_AHEAD = 4


class Preemption:
    """Gives blocks to decoding requests and, when blocks run short, chooses the request to preempt.

    The request of the best rank is never preempted, and all blocks together are enough for any one request.
    So the best one always finishes, then the next: every request ends.
    """

    def __init__(self, resources: Resources) -> None:
        self._resources = resources

    def grow(
        self, decoding: Sequence[tuple[ScheduledRequest, int]]
    ) -> tuple[list[ScheduledRequest], list[BlockUpdate], int]:
        """Give each request the blocks up to the last position that its next round may write.

        decoding: pairs (request, last position). Returns the requests that have their blocks, only the best
        ranks if blocks are short; the new block-table entries; and how many blocks are missing now or for the
        next 4 rounds, at most 0 for none.
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
        limits = resources.limits
        tokens = _ROUNDS_AHEAD * (limits.most_drafts(len(decoding)) + 1)
        low = len(decoding) * (tokens // limits.block_size + 1)
        missing = 0
        if pool.num_free < low:
            soon = (resources.count_missing(scheduled, last + tokens) for scheduled, last in decoding)
            missing = sum(soon) - pool.num_free
        return [scheduled for scheduled, _ in decoding], updates, missing

    def _share_out(
        self, decoding: Sequence[tuple[ScheduledRequest, int]]
    ) -> tuple[list[ScheduledRequest], list[BlockUpdate], int]:
        """Do what `grow` does when blocks are short: after the first request without blocks, give none."""
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
        """Return the request to preempt for `missing` blocks, the worst by rank that no transfer moves.

        None if requests that are being offloaded will free enough blocks, or if no request can leave.
        """
        if missing <= self._resources.count_leaving():
            return None
        last_first = sorted(self._resources.staying(), key=lambda scheduled: scheduled.rank, reverse=True)
        return next((scheduled for scheduled in last_first[:-1] if scheduled.transfer is None), None)
