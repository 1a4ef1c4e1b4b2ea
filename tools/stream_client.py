"""The client of the scenario overhead: many streams of completions over sockets, in a process of its own.

Standard library alone, and nothing is parsed before the last byte has come: on a machine that it shares with
the server it must cost little. Reads lines of {"port", "bodies"} from standard input; answers each with a
line of {"seconds", "streams"}, of each stream its status, the times of its chunks by time.perf_counter(),
their texts and their token ids.
"""

from __future__ import annotations

import json
import selectors
import socket
import sys
import time
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

_LAST_CHUNK = b"\r\n0\r\n\r\n"


class Connection:
    """One request's socket, and what has come from it: bytes, and when how many of them had come."""

    def __init__(self, port: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.sendall(head.encode() + content)
        self._received = bytearray()
        self._ends: list[int] = []
        self._times: list[float] = []

    def read(self) -> bool:
        """Take what has come; True at the end."""
        data = self.socket.recv(1 << 16)
        self._times.append(time.perf_counter())
        self._received += data
        self._ends.append(len(self._received))
        return not data or self._received.endswith(_LAST_CHUNK)

    def parse(self) -> dict[str, Any]:
        """Return the stream's status and its chunks."""
        received = bytes(self._received)
        status = int(received.split(b" ", 2)[1])
        found: dict[str, Any] = {"status": status, "times": [], "texts": [], "token_ids": []}
        if status != 200:
            return found | {"error": received.decode(errors="replace")}
        at = received.index(b"\r\n\r\n") + 4
        while size := int(received[at : (line := received.index(b"\r\n", at))], 16):
            at = line + 2 + size
            now = self._times[bisect_left(self._ends, at)]
            for event in received[line + 2 : at].split(b"\n\n"):
                if event.startswith(b"data: {"):
                    (choice,) = json.loads(event[6:])["choices"]
                    found["times"].append(now)
                    found["texts"].append(choice["text"])
                    found["token_ids"].append(choice.get("token_ids", []))
            at += 2
        return found


def stream_all(port: int, bodies: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Send all bodies at once and read every stream to its end."""
    begin = time.perf_counter()
    connections = [Connection(port, body) for body in bodies]
    with selectors.DefaultSelector() as selector:
        for connection in connections:
            selector.register(connection.socket, selectors.EVENT_READ, connection)
        while selector.get_map():
            for key, _ in selector.select():
                if key.data.read():
                    selector.unregister(key.fileobj)
    seconds = time.perf_counter() - begin
    for connection in connections:
        connection.socket.close()
    return {"seconds": seconds, "streams": [connection.parse() for connection in connections]}


def main() -> None:
    """Answer every line."""
    for line in sys.stdin:
        print(json.dumps(stream_all(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
