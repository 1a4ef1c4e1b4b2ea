"""RunningClock: how long this process has waited for others, less its own pauses."""

from __future__ import annotations

import time

# The most seconds that count between two readings: twice what a listener sleeps.
_LONGEST_INTERVAL_S = 0.4


class RunningClock:
    """Counts the seconds in which the thread that reads the clock ran.

    A pause of the process (Ctrl-Z, a frozen container, a C call that holds the interpreter lock) counts as
    one interval. So the thread reads the messages that came in the pause before it judges their senders.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._last_read = time.monotonic()

    def read(self) -> float:
        """Add the time since the last reading, up to the bound, and return the seconds so far."""
        now = time.monotonic()
        self.seconds += min(now - self._last_read, _LONGEST_INTERVAL_S)
        self._last_read = now
        return self.seconds
