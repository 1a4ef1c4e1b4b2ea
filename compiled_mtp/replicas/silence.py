"""SilenceWatch: limits the time between a replica's messages."""

from __future__ import annotations

import asyncio
from types import TracebackType

_TICKS = 8


class SilenceWatch:
    """An `async with` block that raises TimeoutError if `heard` is not called for `limit_s` seconds.

    Counts only time in which the event loop runs: a late tick counts as one. An ingress that was paused reads
    its replicas' messages afterwards, and must not take its own pause for their silence.
    """

    def __init__(self, limit_s: float) -> None:
        self._tick_s = limit_s / _TICKS
        self._num_silent = 0
        self._clock = asyncio.timeout(None)

    def heard(self) -> None:
        """Restart the count."""
        self._num_silent = 0

    async def __aenter__(self) -> SilenceWatch:
        await self._clock.__aenter__()
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(self._tick_s, self._tick)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        await self._clock.__aexit__(kind, error, traceback)

    def _tick(self) -> None:
        self._num_silent += 1
        # More than _TICKS: the first tick may come right after a message.
        if self._num_silent > _TICKS:
            self._clock.reschedule(self._loop.time())
        else:
            self._timer = self._loop.call_later(self._tick_s, self._tick)
