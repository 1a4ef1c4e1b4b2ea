"""Whose turn it is: a lock that no interrupt can leave taken."""

from __future__ import annotations

import sys
from types import FrameType


class _Call:
    """A call that has, or had, the turn: `frame` is its own, None once it gave the turn back. `heirs` holds,
    under 0, the call that had the turn next.
    """

    __slots__ = ("frame", "heirs")

    def __init__(self, frame: FrameType | None) -> None:
        self.frame = frame
        self.heirs: dict[int, _Call] = {}

    @property
    def is_over(self) -> bool:
        """Whether it has given the turn back, or has ended without."""
        if self.frame is None:
            return True
        try:
            self.frame.clear()
        except RuntimeError:  # A frame that is executing, in any thread, cannot be cleared.
            return False
        return True


class Turn:
    """Lets one call at a time in, of any thread; the call has the turn until it gives it back or ends.

    Ctrl-C may come between a lock and the `try` that would release it, or inside `__exit__`: the lock is then
    taken for ever. Here the holder is known by its frame, and one that is not executing any more holds
    nothing. Taking is one store in a dict, so no interrupt comes between having the turn and being known.
    """

    def __init__(self) -> None:
        self._last = _Call(None)

    def take(self) -> bool:
        """Give the turn to the function that calls this, no generator; False while another call has it."""
        mine, last = _Call(sys._getframe(1)), self._last
        while 0 in last.heirs:
            last = last.heirs[0]
        if not last.is_over or last.heirs.setdefault(0, mine) is not mine:
            return False
        self._last = mine
        return True

    def leave(self) -> None:
        """Give the turn back, by the call that has it: what its frame holds is not to stay until the next."""
        self._last.frame = None
