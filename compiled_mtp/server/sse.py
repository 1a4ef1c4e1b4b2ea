"""Responses that end with their client: server-sent events, and waiting for an answer that somebody wants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from compiled_mtp.server.guard import Receive, Scope, Send

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client went away before its answer was ready."""


class EventStream(Response):
    """Sends events (bytes, each complete) as they come; leaving, from either side, closes `events` and calls
    on_end.

    A client that lets the connection stay full for write_timeout_s seconds is cut off.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncIterator[bytes], write_timeout_s: float, on_end: Callable[[], None]
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._write_timeout_s = write_timeout_s
        # An iterator that was never started has no `finally` that would run.
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events, or as many as somebody reads."""
        sending = asyncio.create_task(self._send_all(scope, send))
        watching = asyncio.create_task(_wait_for_end(receive))
        try:
            await asyncio.wait((sending, watching), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            for task in (sending, watching):
                task.cancel()
            await asyncio.gather(sending, watching, return_exceptions=True)
            self._on_end()

    async def _send_all(self, scope: Scope, send: Send) -> None:
        try:
            async with asyncio.timeout(None) as deadline:
                loop = asyncio.get_running_loop()
                start = {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
                await send(start)
                async for event in self._events:
                    deadline.reschedule(loop.time() + self._write_timeout_s)
                    await send({"type": "http.response.body", "body": event, "more_body": True})
                    deadline.reschedule(None)
                await send({"type": "http.response.body", "body": b""})
        except TimeoutError:
            # What is buffered would keep a closed connection open for as long as nobody reads it.
            abort = scope.get("state", {}).get("abort_connection")
            if abort is not None:
                abort()
        finally:
            close = getattr(self._events, "aclose", None)
            if close is not None:
                await close()


async def unless_gone(request: Request, answer: Coroutine[Any, Any, T]) -> T:
    """Return what `answer` gives. Cancels it and raises ClientGoneError when the client goes away."""
    working = asyncio.create_task(answer)
    watching = asyncio.create_task(_wait_for_end(request.receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _wait_for_end(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
