"""Whether an engine takes requests, and the errors of those that it refuses or loses."""

from __future__ import annotations

import time
from typing import Literal

# "ok" while it takes requests, "draining" while it only ends those it has, "hung" while a step takes too
# long, "stopped" when it decodes no more.
Status = Literal["ok", "draining", "hung", "stopped"]


class QueueFullError(RuntimeError):
    """The queue is full; `retry_after_s`: the seconds after which a running request may have ended."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineStoppedError(RuntimeError):
    """The engine takes no more requests: it is shutting down or died. `code`: its name for clients."""

    code = "stopped"


class EngineHungError(EngineStoppedError):
    """A step has run for longer than `step_timeout_s`."""

    code = "hung"


class SlowReaderError(RuntimeError):
    """A stream's outputs were not read in time; its request was aborted."""


class StepWatch:
    """Tells how long the stepping thread has been busy, and whether its step hangs. Any thread may ask.

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
        """Seconds that the running step has taken; 0 while the clock stands."""
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
