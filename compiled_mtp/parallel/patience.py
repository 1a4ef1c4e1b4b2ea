"""How long this process has waited for others, less the time in which it could not have heard them."""

from __future__ import annotations

import time

# Of the time between two looks, what counts: twice what a listener sleeps.
_LONGEST_LOOK_S = 0.4


class RunningClock:
    """Seconds in which the thread that looks at it ran.

    A pause of the process (Ctrl-Z, a frozen container, a C call that holds the interpreter lock) counts as
    one look, so that what others said in the meantime is read before they are judged.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._seen = time.monotonic()

    def look(self) -> float:
        """Count what has passed after the look before; returns the seconds so far."""
        now = time.monotonic()
        self.seconds += min(now - self._seen, _LONGEST_LOOK_S)
        self._seen = now
        return self.seconds
