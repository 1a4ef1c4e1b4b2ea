"""Stream: the outputs of one request, an asynchronous iterator for one reader."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from compiled_mtp.request import RequestOutput
from compiled_mtp.streams.status import SlowReaderError


class Stream:
    """The outputs of all choices of one request, for one reader on the event loop that added it.

    It ends after an output with a finish_reason for every choice. If outputs are lost, it raises
    SlowReaderError or EngineStoppedError after the outputs before them. The writer calls `put` and `fail` on
    the same loop. on_abort: called at most once, from any thread, when the reader stops reading. image_bytes:
    the bytes of the pixels of the request's images.
    """

    def __init__(
        self,
        on_abort: Callable[[Stream], None],
        loop: asyncio.AbstractEventLoop,
        limit: int,
        num_choices: int,
        image_bytes: int = 0,
    ) -> None:
        self.request_id = ""
        self.is_aborted = False
        self.loop = loop
        self.num_choices = num_choices
        self.image_bytes = image_bytes
        # Choices whose last outputs have not reached the stepping thread, and this stream.
        self.num_running = num_choices
        self._num_due = num_choices
        self._on_abort = on_abort
        self._limit = limit * num_choices
        self._outputs: deque[RequestOutput] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self._is_complete = False

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> RequestOutput:
        while not self._outputs:
            if self._error is not None:
                raise self._error
            if self._is_complete:
                raise StopAsyncIteration
            self._waiter = self.loop.create_future()
            await self._waiter
        return self._outputs.popleft()

    def abort(self) -> None:
        """End the request within one step; does nothing if it has ended. Any thread may call it."""
        if not self._is_complete and not self.is_aborted:
            self.is_aborted = True
            self._on_abort(self)

    def take_ready(self) -> list[RequestOutput]:
        """Return the unread outputs, without waiting."""
        ready = list(self._outputs)
        self._outputs.clear()
        return ready

    def put(self, output: RequestOutput) -> None:
        """Add an output; aborts the request of a reader that has fallen behind."""
        if self._is_complete:
            return
        if len(self._outputs) >= self._limit and output.finish_reason is None:
            self.abort()
            self.fail(
                SlowReaderError(f"the reader fell {self._limit} outputs behind; the request was aborted")
            )
            return
        self._outputs.append(output)
        self._num_due -= output.finish_reason is not None
        self._is_complete = not self._num_due
        self._wake()

    def fail(self, error: Exception) -> None:
        """End with an error, unless all outputs have come."""
        if not self._is_complete:
            self._error, self._is_complete = error, True
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
            self._waiter = None
