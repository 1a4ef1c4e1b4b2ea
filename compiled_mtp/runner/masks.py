"""The masks of a round's rows on the host: filled while the device computes the rows' logits, and copied to
the device before it samples.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from compiled_mtp.plan import StepPlan
from compiled_mtp.sampling.grammar import MaskFiller, Matcher, Window
from compiled_mtp.scheduler.scheduler import GuidedWindow

_ALL_IDS = -1
_MOST_THREADS = 8


class Masks:
    """Host buffers for masks of up to max_rows rows of vocab_size ids, and the threads that fill them.

    num_buffers must exceed the number of launches whose results are unread: the copy of an unread launch may
    still read its buffer. is_pinned: pin the buffers for copies to a GPU. The first `fill` allocates.
    """

    def __init__(
        self, vocab_size: int, max_rows: int, num_buffers: int, num_threads: int | None, *, is_pinned: bool
    ) -> None:
        self._shape = (num_buffers, max_rows, -(-vocab_size // 32))
        self._num_threads = num_threads or min(max((os.cpu_count() or 1) // 2, 1), _MOST_THREADS)
        self._is_pinned = is_pinned
        self._buffers: torch.Tensor | None = None
        self._filler: MaskFiller | None = None
        self._num_fills = 0

    def fill(self, plan: StepPlan, windows: Sequence[GuidedWindow]) -> torch.Tensor:
        """Return the masks of a plan: int32 [slots * (shape.verify + 1), ceil(vocab_size / 32)] on the host.

        Rows of requests without a grammar allow every id. A matcher that fails has its `error` set.
        """
        if self._buffers is None or self._filler is None:
            self._buffers = torch.empty(self._shape, dtype=torch.int32, pin_memory=self._is_pinned)
            self._filler = MaskFiller(self._num_threads)
        buffer = self._buffers[self._num_fills % len(self._buffers)]
        self._num_fills += 1
        masks = buffer[: len(plan.slots) * (plan.shape.verify + 1)]
        masks.fill_(_ALL_IDS)
        self._filler.fill([_window(one) for one in windows], masks)
        return masks


def _window(one: GuidedWindow) -> Window:
    assert isinstance(one.guide, Matcher)
    return Window(one.guide, one.row, one.drafts)
