"""Who comes next: those who wait for a place, by priority and then by arrival, and nobody for ever."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from compiled_mtp.scheduler.holdings import Holding

# One place in so many goes to whoever has waited longest.
_TURN_OF_THE_OLDEST = 8


class Line:
    """Requests without a place: new ones, those to be replayed, and those that lie in host memory.

    They come in by `Holding.rank`. Where priorities differ, every eighth goes to whoever came first; that one
    has then the best rank till its end, so that it is not sent away again: a request of any priority has its
    place after eight times as many others as came before it.
    """

    def __init__(self) -> None:
        self._sorted: list[tuple[tuple[int, int, int], Holding]] = []
        self._num_taken = 0
        # Who came first of all; None where that is to be looked for.
        self._oldest: Holding | None = None

    def __len__(self) -> int:
        return len(self._sorted)

    def __iter__(self) -> Iterator[Holding]:
        return (holding for _, holding in self._sorted)

    def add(self, holding: Holding) -> None:
        """Put a request into its place in the line."""
        insort(self._sorted, (holding.rank, holding), key=_rank)
        if self._oldest is not None and holding.arrival < self._oldest.arrival:
            self._oldest = holding

    def discard(self, holding: Holding) -> None:
        """Take a request out of the line if it stands there."""
        at = bisect_left(self._sorted, holding.rank, key=_rank)
        if at < len(self._sorted) and self._sorted[at][1] is holding:
            del self._sorted[at]
            if self._oldest is holding:
                self._oldest = None

    def first(self) -> Holding | None:
        """Who comes next, None if nobody waits; the same until somebody is taken or a better one comes."""
        if not self._sorted:
            return None
        is_for_oldest = self._num_taken % _TURN_OF_THE_OLDEST == _TURN_OF_THE_OLDEST - 1
        first = self._sorted[0][1]
        if is_for_oldest and first.request.priority != self._sorted[-1][1].request.priority:
            # Asked for at every step until there is room, and the line may be long.
            if self._oldest is None:
                self._oldest = min(self, key=lambda holding: holding.arrival)
            return self._oldest
        return first

    def take(self, holding: Holding) -> None:
        """`holding`, which is `first`, gets its place."""
        is_overtaking = holding is not self._sorted[0][1]
        self.discard(holding)
        self._num_taken += 1
        holding.is_due |= is_overtaking


def _rank(entry: tuple[tuple[int, int, int], Holding]) -> tuple[int, int, int]:
    return entry[0]
