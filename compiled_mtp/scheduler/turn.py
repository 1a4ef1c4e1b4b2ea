"""A lock that no interrupt can leave taken."""

from __future__ import annotations

import sys
from types import FrameType


class _Call:
    """A call that has or had the turn: `frame` is its frame, None after it gave the turn back. `heirs` maps
    0 to the call that took the turn after it.
    """

    __slots__ = ("frame", "heirs")

    def __init__(self, frame: FrameType | None) -> None:
        self.frame = frame
        self.heirs: dict[int, _Call] = {}

    @property
    def is_over(self) -> bool:
        """Whether the call has given the turn back, or has ended without doing so."""
        if self.frame is None:
            return True
        try:
            self.frame.clear()
        except RuntimeError:  # A frame that is executing, in any thread, cannot be cleared.
            return False
        return True


class Turn:
    """Lets one call of any thread in at a time; the call has the turn until it gives it back or ends.

    Ctrl-C may come between taking a lock and the `try` that would release it, or inside `__exit__`; an
    ordinary lock then stays taken for ever. Here the holder is identified by its frame: a frame that no
    longer executes holds nothing. Taking the turn is one store in a dict, which no interrupt can split.
    """

    def __init__(self) -> None:
        self._last = _Call(None)

    def take(self) -> None:
        """Give the turn to the calling function, which must not be a generator.

        Raises ValueError while another call has it.
        """
        mine, last = _Call(sys._getframe(1)), self._last
        while 0 in last.heirs:
            last = last.heirs[0]
        if not last.is_over or last.heirs.setdefault(0, mine) is not mine:
            raise ValueError(
                "engine must be stepped, asked to generate and closed by one thread at a time, got a second "
                "one; let one thread step, any other may call add_request and abort"
            )
        self._last = mine

    def leave(self) -> None:
        """Give the turn back, and drop the frame of the call that has it so that its locals can be freed."""
        self._last.frame = None
