"""The client of the scenario overhead: many streams of completions over sockets, in its own process.

It must cost little on a machine that it shares with the server: it uses only the standard library, and parses
nothing before the last byte has come. Reads lines of {"port", "bodies"} from standard input; answers each
with a line of {"seconds", "streams"}: for each stream its status, the times of its chunks by
time.perf_counter(), their texts and their token ids.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

Received = tuple[bytes, list[int], list[float]]


async def stream(port: int, body: dict[str, Any]) -> Received:
    """Send one request; return the received bytes, and after each read their number and the time."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    content = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    writer.write(head.encode() + content)
    received, ends, times = bytearray(), list[int](), list[float]()
    while data := await reader.read(1 << 16):
        times.append(time.perf_counter())
        received += data
        ends.append(len(received))
    writer.close()
    return bytes(received), ends, times


def parse(received: bytes, ends: Sequence[int], times: Sequence[float]) -> dict[str, Any]:
    """Return the stream's status and its chunks."""
    found: dict[str, Any] = {"status": int(received.split(b" ", 2)[1])}
    if found["status"] != 200:
        return found | {"error": received.decode(errors="replace")}
    events = [*re.finditer(rb"data: (\{.*\})\n", received)]
    choices = [json.loads(event[1])["choices"][0] for event in events]
    return found | {
        "times": [times[bisect_left(ends, event.end())] for event in events],
        "texts": [choice["text"] for choice in choices],
        "token_ids": [choice.get("token_ids", []) for choice in choices],
    }


async def stream_all(port: int, bodies: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Send all bodies at once and read every stream to its end."""
    begin = time.perf_counter()
    found = await asyncio.gather(*(stream(port, body) for body in bodies))
    seconds = time.perf_counter() - begin
    return {"seconds": seconds, "streams": [parse(*one) for one in found]}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(asyncio.run(stream_all(**json.loads(line)))), flush=True)
