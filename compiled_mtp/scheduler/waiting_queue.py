"""Who comes next: those who wait for a place, by priority and then by arrival, and nobody for ever."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from compiled_mtp.scheduler.resources import ScheduledRequest

# One place in so many goes to whoever has waited longest.
_TURN_OF_THE_OLDEST = 8


class WaitingQueue:
    """Requests without a place: new ones, those to be replayed, and those that lie in host memory.

    They come in by `ScheduledRequest.rank`. Where priorities differ, every eighth goes to whoever came first;
    that one has then the best rank till its end, so that it is not sent away again: a request of any priority
    has its place after eight times as many others as came before it.
    """

    def __init__(self) -> None:
        self._sorted: list[tuple[tuple[int, int, int], ScheduledRequest]] = []
        self._num_taken = 0
        # Who came first of all; None where that is to be looked for.
        self._oldest: ScheduledRequest | None = None

    def __len__(self) -> int:
        return len(self._sorted)

    def __iter__(self) -> Iterator[ScheduledRequest]:
        return (scheduled for _, scheduled in self._sorted)

    def add(self, scheduled: ScheduledRequest) -> None:
        """Put a request into its place in the line."""
        insort(self._sorted, (scheduled.rank, scheduled), key=_rank)
        if self._oldest is not None and scheduled.arrival < self._oldest.arrival:
            self._oldest = scheduled

    def discard(self, scheduled: ScheduledRequest) -> None:
        """Take a request out of the line if it stands there."""
        at = bisect_left(self._sorted, scheduled.rank, key=_rank)
        if at < len(self._sorted) and self._sorted[at][1] is scheduled:
            del self._sorted[at]
            if self._oldest is scheduled:
                self._oldest = None

    def first(self) -> ScheduledRequest | None:
        """Who comes next, None if nobody waits; the same until somebody is taken or a better one comes."""
        if not self._sorted:
            return None
        is_for_oldest = self._num_taken % _TURN_OF_THE_OLDEST == _TURN_OF_THE_OLDEST - 1
        first = self._sorted[0][1]
        if is_for_oldest and first.request.priority != self._sorted[-1][1].request.priority:
            # Asked for at every step until there is room, and the line may be long.
            if self._oldest is None:
                self._oldest = min(self, key=lambda scheduled: scheduled.arrival)
            return self._oldest
        return first

    def take(self, scheduled: ScheduledRequest) -> None:
        """`scheduled`, which is `first`, gets its place."""
        is_overtaking = scheduled is not self._sorted[0][1]
        self.discard(scheduled)
        self._num_taken += 1
        scheduled.is_due |= is_overtaking


def _rank(entry: tuple[tuple[int, int, int], ScheduledRequest]) -> tuple[int, int, int]:
    return entry[0]
