"""Responses that end when their client goes away: streams of server-sent events, and whole answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from compiled_mtp.server.auth import Receive, Scope, Send

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client went away before its answer was ready."""


class Connection(Protocol):
    """What a stream needs of its connection, which is `scope["state"]["connection"]`."""

    def write(self, body: bytes) -> bool:
        """Send a part of the answer; return False if the connection is full or closing."""

    @property
    def is_full(self) -> bool:
        """Return whether the send buffer is full."""

    async def wait_for_room(self) -> None:
        """Wait until the send buffer has room or the connection is closed."""

    def abort(self) -> None:
        """Close the connection at once; buffered bytes are lost."""


class EventStream(Response):
    """Sends events (bytes, each complete) as they come; at the end closes `events` and calls on_end.

    The end is the last event, or the client's. A client whose connection stays full for write_timeout_s
    seconds is cut off. Without an event for `ping_s` seconds, `ping` is sent within `ping_s` more.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[bytes],
        write_timeout_s: float,
        on_end: Callable[[], None],
        ping: bytes = b"",
        ping_s: float | None = None,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._write_timeout_s = write_timeout_s
        # Not in the iterator's own `finally`, which does not run if the iterator was never started.
        self._on_end = on_end
        self._ping = ping
        self._ping_s = ping_s
        self._num_sent = 0
        # No ping may be sent before the response's head.
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the last one is sent or the client goes away."""
        connection: Connection = scope["state"]["connection"]
        sending = asyncio.create_task(self._send_all(connection, send))
        watching = asyncio.create_task(_wait_for_end(receive))
        try:
            num_sent = -1
            while True:
                done, _ = await asyncio.wait(
                    (sending, watching), timeout=self._ping_s, return_when=asyncio.FIRST_COMPLETED
                )
                if done:
                    break
                is_quiet = self._has_begun and num_sent == self._num_sent
                if is_quiet and not connection.is_full:
                    connection.write(self._ping)
                num_sent = self._num_sent
            if sending.done():
                sending.result()
        finally:
            for task in (sending, watching):
                task.cancel()
            await asyncio.gather(sending, watching, return_exceptions=True)
            self._on_end()

    async def _send_all(self, connection: Connection, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        try:
            await send(start)
            self._has_begun = True
            async for event in self._events:
                self._num_sent += 1
                # Write past uvicorn's `send`: its bookkeeping costs more than the rest of an event.
                if not connection.write(event):
                    async with asyncio.timeout(self._write_timeout_s):
                        await connection.wait_for_room()
            await send({"type": "http.response.body", "body": b""})
        except TimeoutError:
            # Not close: the connection would stay open until the client has read the buffered bytes.
            connection.abort()
        finally:
            close = getattr(self._events, "aclose", None)
            if close is not None:
                await close()


async def unless_gone(request: Request, answer: Coroutine[Any, Any, T]) -> T:
    """Return the result of `answer`; if the client goes away, cancel it and raise ClientGoneError."""
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
