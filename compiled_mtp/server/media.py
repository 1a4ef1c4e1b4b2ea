"""Fetches the images that a request names by address, where the operator allows it.

By default nothing is fetched. `allow_media_urls` names the hosts whose http and https addresses are, and
`media_root` the directory whose files may be named by file addresses. A host must have public addresses
alone, and the connection goes to an address that was checked: a name that changes in between reaches nothing
else.
"""

from __future__ import annotations

import asyncio
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, unquote, urljoin, urlsplit

from compiled_mtp.errors import fail, shown
from compiled_mtp.frontend.image_prompts import check_count
from compiled_mtp.server.config import ServerConfig
from compiled_mtp.server.errors import ApiError

_MOST_REDIRECTS = 3
_READ_BYTES = 1 << 16
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_SEND_ITSELF = "send the image itself, as data:image/png;base64,..."


class MediaLoader:
    """Fetches the images of a chat that are named by addresses; data URIs stay as they are.

    max_images: the most of a request, 0 if the engine takes none.
    """

    def __init__(self, config: ServerConfig, max_images: int) -> None:
        self._max_images = max_images
        self._hosts = frozenset(host.lower() for host in config.allow_media_urls)
        self._root = None if config.media_root is None else config.media_root.expanduser().resolve()
        self._most_bytes = config.max_media_bytes
        self._timeout_s = config.media_timeout_s

    async def load(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return the messages with every image as a part {"type": "image_url"} with a data URI, or {"type":
        "image", "image": bytes} of a file.

        Raises ApiError (400) for too many images, before any is fetched, for an address that is not allowed,
        and for an image that cannot be fetched.
        """
        every = (message.get("content") for message in messages)
        parts = [part for content in every if isinstance(content, list) for part in content]
        try:
            check_count(sum(part.get("type") == "image_url" for part in parts), self._max_images)
        except ValueError as error:
            raise ApiError(400, str(error), param="messages") from None
        return [await self._load_message(message) for message in messages]

    async def _load_message(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        content = message.get("content")
        if not isinstance(content, list):
            return message
        return {**message, "content": [await self._load_part(part) for part in content]}

    async def _load_part(self, part: Mapping[str, Any]) -> Mapping[str, Any]:
        if part.get("type") != "image_url" or part["image_url"]["url"][:5].lower() == "data:":
            return part
        try:
            # A thread: names are resolved, and files read, by calls that block.
            content = await asyncio.to_thread(self._fetch, part["image_url"]["url"])
        except ValueError as error:
            raise ApiError(400, str(error), param="messages") from None
        return {"type": "image", "image": content}

    def _fetch(self, url: str) -> bytes:
        deadline_s = time.monotonic() + self._timeout_s
        try:
            parts = _split(url)
            if parts.scheme == "file":
                return self._read_file(parts)
            for _ in range(_MOST_REDIRECTS + 1):
                content, location = self._get(parts, deadline_s)
                if location is None:
                    return content
                parts = _split(urljoin(parts.geturl(), location))
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            if time.monotonic() >= deadline_s:
                raise self._too_late() from None
            got = f"{type(error).__name__}: {shown(error)}"
            raise fail("image_url", "name an image that can be fetched", got, _SEND_ITSELF) from None
        raise fail("image_url", f"redirect at most {_MOST_REDIRECTS} times", "more", "give the last address")

    def _read_file(self, parts: SplitResult) -> bytes:
        root = self._root
        if root is None:
            raise fail("image_url", "be a data URI", "a file's address", _SEND_ITSELF)
        name = unquote(parts.path)
        # Resolved: neither .. nor a link leads out of the directory. The system takes no name with a NUL.
        path = root if "\0" in name else Path(name).resolve()
        if parts.netloc or not path.is_relative_to(root) or not path.is_file():
            raise fail("image_url", "name a file in media_root", shown(parts.path), "correct it")
        with path.open("rb") as stream:
            return self._bounded(stream.read(self._most_bytes + 1))

    def _get(self, parts: SplitResult, deadline_s: float) -> tuple[bytes, str | None]:
        """Return the body of an address, or of a redirect no body and the address that it names."""
        host = (parts.hostname or "").lower()
        if parts.scheme not in ("http", "https") or host not in self._hosts:
            got = shown(f"{parts.scheme}://{host}" if host else parts.geturl()[:60])
            rule = "be a data URI" if not self._hosts else f"have a host of {sorted(self._hosts)}"
            raise fail("image_url", rule, got, f"{_SEND_ITSELF}, or start with --allow-media-urls HOST")
        port = parts.port or (443 if parts.scheme == "https" else 80)
        plain = _connect(host, port, max(deadline_s - time.monotonic(), 0.001))
        connection = http.client.HTTPConnection(host, port)
        connection.sock = plain
        with _ended_at(deadline_s, plain), closing(connection):
            if parts.scheme == "https":
                connection.sock = ssl.create_default_context().wrap_socket(plain, server_hostname=host)
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            connection.request("GET", target, headers={"User-Agent": "compiled-mtp", "Accept": "image/*"})
            answer = connection.getresponse()
            location = answer.headers.get("Location")
            if answer.status in (301, 302, 303, 307, 308) and location is not None:
                return b"", location
            if answer.status != 200:
                raise fail("image_url", "be answered with status 200", answer.status, _SEND_ITSELF)
            return self._read_body(answer, deadline_s), None

    def _read_body(self, answer: http.client.HTTPResponse, deadline_s: float) -> bytes:
        content = bytearray()
        while len(content) <= self._most_bytes and (part := answer.read1(_READ_BYTES)):
            content += part
        if time.monotonic() >= deadline_s:
            raise self._too_late()
        return self._bounded(bytes(content))

    def _too_late(self) -> ValueError:
        return fail("image_url", f"arrive within {self._timeout_s:g} seconds", "a slower one", _SEND_ITSELF)

    def _bounded(self, content: bytes) -> bytes:
        if len(content) > self._most_bytes:
            raise fail("image_url", f"have at most {self._most_bytes} bytes", "more", "shrink the image")
        return content


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        _ = parts.port  # Raises for one out of range.
    except ValueError as error:
        raise fail("image_url", "be an address", error, _SEND_ITSELF) from None
    return parts


@contextmanager
def _ended_at(deadline_s: float, connected: socket.socket) -> Iterator[None]:
    """End a connection at the deadline: each read has a timeout of its own, and a host may send few bytes."""
    # TLS takes the socket's descriptor over.
    own = connected.dup()

    def end() -> None:
        with suppress(OSError):
            own.shutdown(socket.SHUT_RDWR)

    watch = threading.Timer(max(deadline_s - time.monotonic(), 0), end)
    watch.daemon = True
    watch.start()
    try:
        yield
    finally:
        watch.cancel()
        watch.join()
        own.close()


def _connect(host: str, port: int, timeout_s: float) -> socket.socket:
    """Return a connection to a public address of `host`. Raises ValueError if it has another kind."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [str(entry[4][0]) for entry in found]
    if any(not is_public(address) for address in addresses):
        raise fail("image_url", "have a host with only public addresses", host, _SEND_ITSELF)
    return socket.create_connection((addresses[0], port), timeout=timeout_s)


def is_public(address: str) -> bool:
    """Return whether an IP address belongs to the public internet."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return is_public(str(parsed.ipv4_mapped))
        # Tunnels lead to any address of IPv4.
        if parsed in _NAT64 or parsed.sixtofour is not None or parsed.teredo is not None:
            return False
    return parsed.is_global and not parsed.is_multicast
