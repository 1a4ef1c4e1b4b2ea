"""Auth middleware: checks Host, key and content type, and reads the body. Plain ASGI, before all routes.

The body is read here, within its limits of time and size, so that a handler is called with all of it.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette._utils import get_route_path

from compiled_mtp.server.config import ServerConfig
from compiled_mtp.server.errors import ApiError, api_of
from compiled_mtp.server.static import PATHS

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

# GET and HEAD of these paths need no key: load balancers and browsers ask before they know one.
_OPEN_METHODS = ("GET", "HEAD")
_OPEN_PATHS = frozenset(("/health", *PATHS))


class AuthMiddleware:
    """Wraps an ASGI app. Keeps keys as digests only and never writes them anywhere."""

    def __init__(self, app: App, config: ServerConfig, max_body_bytes: int) -> None:
        self._app = app
        self._config = config
        self._max_body_bytes = max_body_bytes
        self._hosts = config.hosts()
        self._digests = tuple(hashlib.sha256(key.encode()).digest() for key in config.read_keys())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request and pass it on, or answer it with the error."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = _Headers(scope["headers"])
        # The router's path: without the app's mount prefix. The prefix alone leads to the page.
        path = get_route_path(scope) or "/"
        try:
            self._check_host(headers)
            if scope["method"] not in _OPEN_METHODS or path not in _OPEN_PATHS:
                self._check_key(headers)
            body = b""
            if scope["method"] in ("POST", "PUT", "PATCH"):
                self._check_kind(headers)
                body = await self._read_body(headers, receive)
        except ApiError as error:
            await _answer(error, path, send)
            return
        except _ClientGoneError:
            # No client reads this answer, but without it log and metrics would count a server error (500).
            await send({"type": "http.response.start", "status": 499, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return
        await self._app(scope, _replay(body, receive), send)

    def _check_host(self, headers: _Headers) -> None:
        host = headers.one("host")
        if "*" not in self._hosts and _name_of(host) not in self._hosts:
            raise ApiError(
                403,
                f"Host must be a name of this server, got {host!r}; add it to allowed_hosts",
                code="host_not_allowed",
            )

    def _check_key(self, headers: _Headers) -> None:
        if not self._digests:
            return
        scheme, _, bearer = headers.one("authorization").partition(" ")
        given = bearer.strip() if scheme.lower() == "bearer" else headers.one("x-api-key")
        # Browsers send non-ASCII characters as Latin-1, shells as UTF-8.
        digests = [hashlib.sha256(form).digest() for form in (given.encode(), given.encode("latin-1"))]
        # Compare with every key, so that the time does not reveal which key was close.
        is_known = False
        for known in self._digests:
            for digest in digests:
                is_known |= hmac.compare_digest(digest, known)
        if not is_known:
            raise ApiError(
                401,
                "the key must be one of this server's, got another or none; send it as Authorization: "
                "Bearer or x-api-key",
                code="invalid_api_key",
            )

    def _check_kind(self, headers: _Headers) -> None:
        kind = headers.one("content-type")
        if kind.partition(";")[0].strip().lower() != "application/json":
            raise ApiError(
                415,
                f"Content-Type must be application/json, got {kind!r}; send the body as JSON",
                code="unsupported_media_type",
            )
        if headers.one("content-encoding").lower() not in ("", "identity"):
            raise ApiError(
                415,
                f"Content-Encoding must be identity, got {headers.one('content-encoding')!r}; send it plain",
                code="unsupported_encoding",
            )

    async def _read_body(self, headers: _Headers, receive: Receive) -> bytes:
        limit = self._max_body_bytes
        too_large = ApiError(
            413,
            f"the body must be at most {limit} bytes (max_body_bytes), got more; send less",
            code="body_too_large",
        )
        length = headers.one("content-length")
        if length.isdigit() and (len(length) > 18 or int(length) > limit):
            raise too_large
        parts = bytearray()
        try:
            async with asyncio.timeout(self._config.body_timeout_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _ClientGoneError
                    parts += message.get("body", b"")
                    if len(parts) > limit:
                        raise too_large
                    if not message.get("more_body", False):
                        return bytes(parts)
        except TimeoutError:
            raise ApiError(
                408,
                f"the body must arrive within {self._config.body_timeout_s:g} seconds, got "
                f"{len(parts)} bytes; send it faster",
                code="body_timeout",
            ) from None


class _ClientGoneError(Exception):
    """The client went away before its request was complete."""


class _Headers:
    """Headers of a request by lower-case name.

    The values of a header that is sent twice are joined by a comma, and match no allowed value.
    """

    def __init__(self, raw: list[tuple[bytes, bytes]]) -> None:
        self._values: dict[str, list[str]] = {}
        for name, value in raw:
            self._values.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))

    def one(self, name: str) -> str:
        """Return the header's value, "" if it was not sent."""
        return ", ".join(self._values.get(name, []))


def _name_of(host: str) -> str:
    """Return the name in a Host header: `[::1]:80` gives `::1`, `Localhost:80` gives `localhost`."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the whole body, then the connection's next messages."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return pending.pop() if pending else await receive()

    return replayed


async def _answer(error: ApiError, path: str, send: Send) -> None:
    body = json.dumps(error.body(api_of(path))).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
    if error.status in (408, 413):
        # The rest of the body was not read, so the connection cannot carry another request.
        headers["connection"] = "close"
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
