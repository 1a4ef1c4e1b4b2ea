"""Runs copies between the device and host memory: on a stream of their own on a GPU, at once on a CPU."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch

from compiled_mtp.cache.host_tier import Staging

logger = logging.getLogger(__name__)


class _UnderWay(NamedTuple):
    step_id: int
    copy_id: int
    event: torch.Event


class CopyStream:
    """A copy stream, and the staging buffer in which its copies pack rows.

    A copy runs after all launches that were queued before it, and concurrently with later launches unless
    `hold_launches` makes these wait. `take_done` polls for complete copies. On a CPU, where is_apart is
    False, a queued copy is complete.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_apart = device.type == "cuda"
        self.staging = Staging(device)
        self._device = device
        self._stream = torch.cuda.Stream(device) if self.is_apart else None
        # Whether copies are queued for which `hold_launches` was not called yet.
        self._is_ahead = False
        self._under_way: list[_UnderWay] = []

    def reserve(self, num_bytes: int) -> None:
        """Make the staging buffer hold num_bytes. Raises RuntimeError if the device has no memory for it.

        The allocator takes it on the copy stream, so memory that a smaller buffer leaves is reused only after
        the copies queued so far.
        """
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            self.staging.reserve(num_bytes)

    @contextmanager
    def queue(self) -> Iterator[None]:
        """Run the copies made within on this stream."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._is_ahead = True
        with torch.cuda.stream(self._stream):
            yield

    def hold_launches(self) -> None:
        """Make launches that are queued later wait for the copies queued so far. Not within `queue`."""
        if self._stream is not None and self._is_ahead:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            self._is_ahead = False

    def record(self, step_id: int, copy_id: int) -> None:
        """Note that all of this copy, of that plan, is queued. Within `queue`."""
        if self.is_apart:
            event = torch.Event(self._device)
            event.record()
            self._under_way.append(_UnderWay(step_id, copy_id, event))

    def take_done(self, step_id: int, *, waits: bool) -> list[int]:
        """Return, once, the complete copies of plans up to step_id; `waits` for all copies of these plans."""
        if not self._under_way:
            return []
        due = [copy for copy in self._under_way if copy.step_id <= step_id]
        if waits:
            for copy in due:
                copy.event.synchronize()
        done = {copy.copy_id for copy in due if copy.event.query()}
        self._under_way = [copy for copy in self._under_way if copy.copy_id not in done]
        return sorted(done)

    def wait(self, step_id: int | None = None) -> None:
        """Wait for all copies, and forget those under way: all of them, or those of one plan."""
        if self._stream is not None:
            try:
                self._stream.synchronize()
            except RuntimeError as error:  # The failed launch has already ended its requests.
                logger.error("the device failed", exc_info=error)
        kept = [] if step_id is None else [copy for copy in self._under_way if copy.step_id != step_id]
        self._under_way = kept
