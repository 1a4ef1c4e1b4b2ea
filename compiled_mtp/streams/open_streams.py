"""OpenStreams: the streams of an engine's open requests, by their ids."""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from compiled_mtp.errors import quote
from compiled_mtp.request import RequestOutput
from compiled_mtp.streams.limits import check_choices, check_image_bytes
from compiled_mtp.streams.stream import Stream

Batches = dict[asyncio.AbstractEventLoop, list[tuple[Stream, RequestOutput]]]


class OpenStreams:
    """Finds the streams of outputs, and bounds what open requests take: choices, and pixels of images.

    Several threads use it under one lock of the caller, which also guards what else changes with it.
    max_image_bytes: the most bytes of pixels.
    """

    def __init__(self, max_open: int, max_image_bytes: int) -> None:
        self.num_choices = 0
        self._max_open = max_open
        self._image_bytes = 0
        self._max_image_bytes = max_image_bytes
        self._streams: dict[str, Stream] = {}
        self._mean_total_s = 1.0

    def __contains__(self, stream: Stream) -> bool:
        # Another request may use its id by now.
        return self._streams.get(stream.request_id) is stream

    def add(self, streams: Sequence[Stream], requests: Sequence[Mapping[str, Any]], num_running: int) -> None:
        """Open streams under the ids of their requests; new ids are made for requests without one.

        Call it before the requests are queued, because their outputs may come at once. num_running: choices
        that decode now. Raises ValueError and QueueFullError as the limits do, and ValueError for an id in
        use; then none is open.
        """
        num_choices = sum(stream.num_choices for stream in streams)
        # By then a running request has probably ended.
        retry_after_s = min(60, max(1, math.ceil(self._mean_total_s / max(1, num_running))))
        check_choices(num_choices, self.num_choices, self._max_open, retry_after_s)
        check_image_bytes(streams, self._image_bytes, self._max_image_bytes)
        names: dict[str, Stream] = {}
        for stream, request in zip(streams, requests, strict=True):
            name = request.get("request_id")
            if name is None:
                name = f"request-{uuid.uuid4().hex[:16]}"
            if name in self._streams or name in names:
                raise ValueError(f"request_id must be unused, got {quote(name)}; choose another")
            stream.request_id = name
            names[name] = stream
        self._streams.update(names)
        self.num_choices += num_choices
        self._image_bytes += sum(stream.image_bytes for stream in streams)

    def forget(self, stream: Stream) -> None:
        """Close the stream of a request that was not queued."""
        if stream in self:
            del self._streams[stream.request_id]
            self.num_choices -= stream.num_choices
            self._image_bytes -= stream.image_bytes

    def sort(self, outputs: Sequence[RequestOutput]) -> Batches:
        """Return outputs with their streams by event loop; closes the streams whose last choice ended."""
        batches: Batches = {}
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            batches.setdefault(stream.loop, []).append((stream, output))
            if output.finish_reason is not None:
                self.num_choices -= 1
                self._mean_total_s += (output.metrics.total_s - self._mean_total_s) / 16
                stream.num_running -= 1
                if not stream.num_running:
                    del self._streams[output.request_id]
                    self._image_bytes -= stream.image_bytes
        return batches

    def take_all(self) -> list[Stream]:
        """Close and return all streams."""
        streams = list(self._streams.values())
        self._streams.clear()
        self.num_choices = self._image_bytes = 0
        return streams
