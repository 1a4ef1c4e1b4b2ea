"""ReplicatedEngine: many engines as one, with AsyncEngine's interface for the service."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import secrets
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from compiled_mtp.replicas.messages import Call
from compiled_mtp.replicas.relay import OpenReplica, Relay, RelayLimits, RelayObserver
from compiled_mtp.replicas.routing import prefix_key
from compiled_mtp.request import SamplingParams, derive_seed
from compiled_mtp.streams.limits import (
    DEFAULT_IMAGE_BYTES,
    check_choices,
    check_image_bytes,
    count_image_bytes,
)
from compiled_mtp.streams.status import EngineStoppedError, Status
from compiled_mtp.streams.stream import Stream


class ReplicatedEngine:
    """Takes requests as AsyncEngine does and sends them to replicas. Belongs to one event loop.

    Every request gets a seed before it is sent: its own, one derived from `seed`, or a drawn one. So any
    replica decodes it to the same tokens, and its stream outlives the replica. chunk, num_chunks: tokens of
    a prefill chunk, and how many chunks decide which replica is preferred. max_open: choices that may be open
    at a time. max_image_bytes: bytes of pixels of their images, which are kept for another replica.
    stream_buffer: the most unread outputs of a choice. image_token_id: the pad of images, None for none.
    """

    def __init__(
        self,
        open_replica: OpenReplica,
        observer: RelayObserver,
        limits: RelayLimits,
        *,
        seed: int | None,
        chunk: int,
        num_chunks: int,
        max_open: int,
        stream_buffer: int,
        max_image_bytes: int = DEFAULT_IMAGE_BYTES,
        image_token_id: int | None = None,
    ) -> None:
        self.max_open = max_open
        self._max_image_bytes = max_image_bytes
        self._image_token_id = image_token_id
        self._open = open_replica
        self._observer = observer
        self._limits = limits
        self._seed = seed
        self._chunk = chunk
        self._num_chunks = num_chunks
        self._stream_buffer = stream_buffer
        self._numbers = itertools.count()
        self._num_open = 0
        self._tasks: dict[Stream, asyncio.Task[None]] = {}
        self._relays: set[Relay] = set()
        self._closing: str | None = None
        self._is_closed = False

    @property
    def status(self) -> Status:
        """Return "ok" while it takes requests, "draining" while it decodes only open ones, then "stopped".

        A replica that hangs does not change it.
        """
        return "ok" if self._closing is None else "stopped" if self._is_closed else "draining"

    @property
    def num_open(self) -> int:
        """Choices that run or wait."""
        return self._num_open

    @property
    def num_unrouted(self) -> int:
        """Requests that no replica has accepted yet."""
        return sum(not relay.accepted.done() for relay in self._relays)

    async def add_all(self, requests: Sequence[Mapping[str, Any]]) -> list[Stream]:
        """Add several requests, or none if one is refused; return their streams once replicas accept them.

        requests: mappings with `prompt_token_ids`, `params`, `priority` and prepared `images`. Raises
        ValueError, QueueFullError and EngineStoppedError.
        """
        params = [request.get("params") or SamplingParams() for request in requests]
        self._check_open(sum(one.n for one in params))
        loop = asyncio.get_running_loop()
        streams = [
            Stream(self._abort, loop, self._stream_buffer, one.n, count_image_bytes(request))
            for request, one in zip(requests, params, strict=True)
        ]
        num_open = sum(stream.image_bytes for stream in self._tasks)
        check_image_bytes(streams, num_open, self._max_image_bytes)
        relays = [self._start(*one) for one in zip(requests, params, streams, strict=True)]
        accepted = [relay.accepted for _, relay in relays]
        try:
            await asyncio.wait(accepted, return_when=asyncio.FIRST_EXCEPTION)
            for future in accepted:
                if future.done():
                    future.result()
        except BaseException:
            for stream, _ in relays:
                stream.abort()
            raise
        return [stream for stream, _ in relays]

    async def drain(self, timeout_s: float) -> bool:
        """Take no more requests, wait for the open ones, and close; return whether all of them ended."""
        self._closing = "the server is shutting down; try another or later"
        deadline = time.monotonic() + timeout_s
        while self._num_open and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        is_empty = not self._num_open
        self.close()
        return is_empty

    def close(self) -> None:
        """Abort the open requests; call it on the event loop."""
        self._closing = self._closing or "the server was shut down"
        self._is_closed = True
        for stream in list(self._tasks):
            stream.abort()

    def _check_open(self, num_more: int) -> None:
        if self._closing is not None:
            raise EngineStoppedError(self._closing)
        check_choices(num_more, self._num_open, self.max_open, retry_after_s=1)

    def _start(
        self, request: Mapping[str, Any], params: SamplingParams, stream: Stream
    ) -> tuple[Stream, Relay]:
        token_ids = list(request["prompt_token_ids"])
        number = next(self._numbers)
        if params.seed is None:
            drawn = secrets.randbits(63) if self._seed is None else derive_seed(self._seed, number)
            params = params.model_copy(update={"seed": drawn})
        images = tuple(request.get("images") or ())
        prefix = prefix_key(
            token_ids,
            chunk=self._chunk,
            num_chunks=self._num_chunks,
            salt=params.cache_salt,
            images=images,
            image_token_id=self._image_token_id,
        )
        call = Call(token_ids, params, request.get("priority", 0), prefix, images=images)
        stream.request_id = request.get("request_id") or f"request-{uuid.uuid4().hex[:16]}"
        relay = Relay(call, stream, self._open, self._limits, self._observer)
        self._num_open += params.n
        # A context per call: Ray takes a call's id from it, and of two waiting calls of one id routes one.
        task = stream.loop.create_task(relay.run(), context=contextvars.Context())
        self._tasks[stream] = task
        self._relays.add(relay)
        task.add_done_callback(lambda done: self._end(stream, relay, done))
        return stream, relay

    def _end(self, stream: Stream, relay: Relay, task: asyncio.Task[None]) -> None:
        del self._tasks[stream]
        self._relays.discard(relay)
        self._num_open -= stream.num_choices
        relay.settle(task)

    def _abort(self, stream: Stream) -> None:
        stream.loop.call_soon_threadsafe(self._cancel, stream)

    def _cancel(self, stream: Stream) -> None:
        if (task := self._tasks.get(stream)) is not None:
            task.cancel()
