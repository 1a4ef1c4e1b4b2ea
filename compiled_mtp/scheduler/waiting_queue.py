"""The waiting queue: by priority, then by arrival, and without starvation."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from compiled_mtp.scheduler.scheduled_request import ScheduledRequest

# One of this many admissions goes to the request that arrived first.
_TURN_OF_THE_OLDEST = 8


class WaitingQueue:
    """Requests without a slot: new ones, preempted ones to be replayed, and offloaded ones.

    They are admitted by `ScheduledRequest.rank`. Where priorities differ, every eighth admission goes to the
    request that arrived first, which keeps the best rank to its end and is not preempted again. A request
    that arrived after n others waits for at most about 8 n admissions, whatever its priority.
    """

    def __init__(self) -> None:
        self._sorted: list[tuple[tuple[int, int, int], ScheduledRequest]] = []
        self._num_taken = 0
        # The request that arrived first; None until `first` looks for it.
        self._oldest: ScheduledRequest | None = None

    def __len__(self) -> int:
        return len(self._sorted)

    def __iter__(self) -> Iterator[ScheduledRequest]:
        return (scheduled for _, scheduled in self._sorted)

    def add(self, scheduled: ScheduledRequest) -> None:
        """Insert a request by its rank."""
        insort(self._sorted, (scheduled.rank, scheduled), key=_rank)
        if self._oldest is not None and scheduled.arrival < self._oldest.arrival:
            self._oldest = scheduled

    def discard(self, scheduled: ScheduledRequest) -> None:
        """Remove a request if it is in the queue."""
        at = bisect_left(self._sorted, scheduled.rank, key=_rank)
        if at < len(self._sorted) and self._sorted[at][1] is scheduled:
            del self._sorted[at]
            if self._oldest is scheduled:
                self._oldest = None

    def first(self) -> ScheduledRequest | None:
        """Return the next request, None if the queue is empty; the same one until `take` or `add` is called
        for another."""
        if not self._sorted:
            return None
        is_for_oldest = self._num_taken % _TURN_OF_THE_OLDEST == _TURN_OF_THE_OLDEST - 1
        first = self._sorted[0][1]
        if is_for_oldest and first.request.priority != self._sorted[-1][1].request.priority:
            # Kept: the planner calls this at every step until there is room, and the queue may be long.
            if self._oldest is None:
                self._oldest = min(self, key=lambda scheduled: scheduled.arrival)
            return self._oldest
        return first

    def take(self, scheduled: ScheduledRequest) -> None:
        """Remove `scheduled`, which must be `first()`, and count an admission. Sets is_due if it overtakes
        requests of a better rank.
        """
        is_overtaking = scheduled is not self._sorted[0][1]
        self.discard(scheduled)
        self._num_taken += 1
        scheduled.is_due |= is_overtaking


def _rank(entry: tuple[tuple[int, int, int], ScheduledRequest]) -> tuple[int, int, int]:
    return entry[0]
