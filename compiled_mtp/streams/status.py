"""Whether an engine takes requests, and the errors of those that it refuses or loses."""

from __future__ import annotations

import time
from typing import Literal

# The engine takes requests ("ok"), only finishes open ones ("draining"), has a step that takes too long
# ("hung") or has ended ("stopped").
Status = Literal["ok", "draining", "hung", "stopped"]


class QueueFullError(RuntimeError):
    """The queue is full. retry_after_s: seconds until a running request may have ended."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineStoppedError(RuntimeError):
    """The engine takes no more requests: it is shutting down or has died. code: its name for clients."""

    code = "stopped"


class EngineHungError(EngineStoppedError):
    """A step has run for longer than `step_timeout_s`."""

    code = "hung"


class SlowReaderError(RuntimeError):
    """The reader of a stream fell behind, and the engine aborted the request."""


class StepWatch:
    """Measures how long the running step takes, and whether it hangs. Any thread may ask.

    timeout_s: seconds after which a step hangs.
    """

    def __init__(self, timeout_s: float) -> None:
        if not timeout_s > 0:
            raise ValueError(f"step_timeout_s must be above 0, got {timeout_s}; raise it")
        self.timeout_s = timeout_s
        self._began_s: float | None = None

    def begin(self) -> None:
        """Start the clock, at the beginning of a step."""
        self._began_s = time.monotonic()

    def pause(self) -> None:
        """Stop the clock, because there is nothing to step."""
        self._began_s = None

    @property
    def age_s(self) -> float:
        """Seconds since the running step began; 0 while no step runs."""
        began_s = self._began_s
        return 0.0 if began_s is None else time.monotonic() - began_s

    @property
    def is_hung(self) -> bool:
        """Whether the running step has taken longer than `timeout_s`."""
        return self.age_s > self.timeout_s

    def error(self) -> EngineHungError:
        """Return the error that names the running step's age."""
        return EngineHungError(
            f"a step must end within {self.timeout_s:g} s (step_timeout_s), got one that has run for "
            f"{self.age_s:.1f} s; restart the process, or raise step_timeout_s for a slow device"
        )

    def check(self) -> None:
        """Raise EngineHungError while the step hangs."""
        if self.is_hung:
            raise self.error()
