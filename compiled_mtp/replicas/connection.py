"""The connection that streams need (server.sse.Connection), over a server that has only ASGI's `send`."""

from __future__ import annotations

import asyncio
from collections import deque

from compiled_mtp.server.auth import App, Message, Receive, Scope, Send

# Unsent bytes at which a connection is full.
_MOST_BYTES = 64 * 1024


class BufferedConnection:
    """Buffers what is written and sends it in order, in a separate task."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._parts: deque[bytes] = deque()
        self._num_bytes = 0
        self._pump: asyncio.Task[None] | None = None
        self._is_aborted = False
        self._error: Exception | None = None

    def write(self, body: bytes) -> bool:
        """Buffer a part of the answer; return False when the connection is full.

        Raises an earlier error of the server's `send`.
        """
        self._check()
        if not self._is_aborted:
            self._parts.append(body)
            self._num_bytes += len(body)
            if self._pump is None or self._pump.done():
                self._pump = asyncio.create_task(self._send_parts())
        return not self.is_full

    @property
    def is_full(self) -> bool:
        """Whether more than _MOST_BYTES wait to be sent."""
        return self._num_bytes > _MOST_BYTES

    async def wait_for_room(self) -> None:
        """Wait until everything is sent. Raises an error of the server's `send`."""
        while self._pump is not None and (self._parts or not self._pump.done()):
            await asyncio.shield(self._pump)
        self._check()

    def abort(self) -> None:
        """Stop sending: drop the buffer and the rest of the answer."""
        self._is_aborted = True
        self._parts.clear()
        self._num_bytes = 0
        if self._pump is not None:
            self._pump.cancel()

    async def send(self, message: Message) -> None:
        """Send an ASGI message after everything written before. Raises an error of the server's `send`."""
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
                # Keep the error: the next call of `write`, `send` or `wait_for_room` raises it.
                self._error, self._num_bytes = error, 0
                self._parts.clear()
                return
            self._num_bytes -= len(body)


class WithConnection:
    """Middleware that gives an app's streams a connection where the server (Ray Serve's replica) has none."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle an ASGI request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        connection = BufferedConnection(send)
        state = {**scope.get("state", {}), "connection": connection}
        try:
            await self._app({**scope, "state": state}, receive, connection.send)
        finally:
            connection.abort()
