"""Where copies between the device and host memory run: beside the launches on a GPU, at once on a CPU."""

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
    """A stream of copies, and the buffer that they pack rows in.

    What is queued runs behind all launches that were queued before, and beside those that come later unless
    these are held. Which copies are complete is asked for, not waited for. On a CPU, where is_apart is False,
    whatever is queued has been done.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_apart = device.type == "cuda"
        self.staging = Staging(device)
        self._device = device
        self._stream = torch.cuda.Stream(device) if self.is_apart else None
        # Something was queued that launches do not wait for yet.
        self._is_ahead = False
        self._under_way: list[_UnderWay] = []

    def reserve(self, num_bytes: int) -> None:
        """Have the buffer for so many bytes at once, and of the lane's own memory, which others get only
        behind what is queued here. Raises RuntimeError if there is none.
        """
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            self.staging.reserve(num_bytes)

    @contextmanager
    def queue(self) -> Iterator[None]:
        """Copies that are made within run on this lane."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._is_ahead = True
        with torch.cuda.stream(self._stream):
            yield

    def hold_launches(self) -> None:
        """Have launches that are queued later wait for what was queued here so far. Not within `queue`."""
        if self._stream is not None and self._is_ahead:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            self._is_ahead = False

    def record(self, step_id: int, copy_id: int) -> None:
        """All of this copy, of that plan, has been queued. Within `queue`."""
        if self.is_apart:
            event = torch.Event(self._device)
            event.record()
            self._under_way.append(_UnderWay(step_id, copy_id, event))

    def take_done(self, step_id: int, *, waits: bool) -> list[int]:
        """The copies of plans up to step_id that are complete and were not taken yet; `waits` for all of
        them.
        """
        due = [copy for copy in self._under_way if copy.step_id <= step_id]
        if waits:
            for copy in due:
                copy.event.synchronize()
        done = {copy.copy_id for copy in due if copy.event.query()}
        self._under_way = [copy for copy in self._under_way if copy.copy_id not in done]
        return sorted(done)

    def wait(self, step_id: int | None = None) -> None:
        """Wait for everything, and forget which copies are under way: all, or those of one plan."""
        if self._stream is not None:
            try:
                self._stream.synchronize()
            except RuntimeError as error:  # Whoever ran a request has been told already.
                logger.error("the device failed", exc_info=error)
        kept = [] if step_id is None else [copy for copy in self._under_way if copy.step_id != step_id]
        self._under_way = kept
