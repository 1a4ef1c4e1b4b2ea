"""The connection that streams need (server.sse.Connection), over a server whose `send` is all there is."""

from __future__ import annotations

import asyncio
from collections import deque

from compiled_mtp.server.auth import App, Message, Receive, Scope, Send

# Unsent bytes at which a connection is full.
_MOST_BYTES = 64 * 1024


class SentConnection:
    """Buffers what is written and sends it in order, in a task of its own."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._parts: deque[bytes] = deque()
        self._num_bytes = 0
        self._pump: asyncio.Task[None] | None = None
        self._is_aborted = False
        self._error: Exception | None = None

    def write(self, body: bytes) -> bool:
        """Send a part of the answer; False when the connection is full. Raises what the server's `send`
        raised before."""
        self._check()
        if not self._is_aborted:
            self._parts.append(body)
            self._num_bytes += len(body)
            if self._pump is None or self._pump.done():
                self._pump = asyncio.create_task(self._send_parts())
        return not self.is_full

    @property
    def is_full(self) -> bool:
        """Whether what was written has yet to be sent."""
        return self._num_bytes > _MOST_BYTES

    async def wait_for_room(self) -> None:
        """Until everything is sent. Raises what the server's `send` raised."""
        while self._pump is not None and (self._parts or not self._pump.done()):
            await asyncio.shield(self._pump)
        self._check()

    def abort(self) -> None:
        """Send no more: what is buffered is lost, and so is the end of the answer."""
        self._is_aborted = True
        self._parts.clear()
        self._num_bytes = 0
        if self._pump is not None:
            self._pump.cancel()

    async def send(self, message: Message) -> None:
        """Send an ASGI message, behind everything that was written. Raises what the server's `send` raises,
        now or before."""
        if not self._is_aborted:
            await self.wait_for_room()
            await self._send(message)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    async def _send_parts(self) -> None:
        while self._parts:
            body = b"".join(self._parts)
            self._parts.clear()
            try:
                await self._send({"type": "http.response.body", "body": body, "more_body": True})
            except Exception as error:
                # Nobody may be waiting now; whoever writes or waits next is told.
                self._error, self._num_bytes = error, 0
                self._parts.clear()
                return
            self._num_bytes -= len(body)


class WithConnection:
    """Gives an app's streams a connection where the server (Ray Serve's replica) has none."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        connection = SentConnection(send)
        state = {**scope.get("state", {}), "connection": connection}
        try:
            await self._app({**scope, "state": state}, receive, connection.send)
        finally:
            connection.abort()
