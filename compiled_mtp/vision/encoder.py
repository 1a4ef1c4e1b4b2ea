"""Runs the vision tower for the prompts of slots, in slices, and keeps their features until they are read."""

from __future__ import annotations

import ctypes
from collections.abc import Collection

import torch

from compiled_mtp.plan import EncodeSlice, ImageSpan
from compiled_mtp.vision.tower import Passage, VisionTower


class Encoder:
    """The features of images, by slot and number in the prompt: [tokens, hidden_size] on the device.

    They exist from the last slice of the image to the prompt chunk with the image's last token, or until the
    slot is released. A prompt that is prefilled again encodes its images again, to the same bits.
    """

    def __init__(self, tower: VisionTower) -> None:
        self.tower = tower
        self._device = tower.pos_embed.weight.device
        self._features: dict[tuple[int, int], tuple[int, torch.Tensor]] = {}
        # The images that are in the tower.
        self._open: dict[tuple[int, int], Passage] = {}
        self._staging = _Staging(tower.config.most_tokens * self._cell_bytes) if self._is_on_gpu else None

    @torch.no_grad()
    def encode(self, slot: int, part: EncodeSlice) -> None:
        """Run a slice for an image of a slot's prompt; slices of one image come in order."""
        key, span = (slot, part.image), part.span
        if part.first_part == 0:
            self._open[key] = self.tower.embed(self._upload(part.pixels, span))
        passage = self._open.pop(key)
        self.tower.run(passage, part.first_part, part.end_part)
        if part.is_last:
            self._features[key] = (span.end, self.tower.merge(passage))
        else:
            self._open[key] = passage

    def warm_up(self) -> None:
        """On a GPU, encode an image of the most tokens.

        Later images find their kernels loaded and the allocator's memory taken: to take it anew would stop
        the rounds of other requests.
        """
        if not self._is_on_gpu:
            return
        span = ImageSpan(0, 1, self.tower.config.most_tokens)
        end = self.tower.count_parts(span.num_tokens)
        self.encode(0, EncodeSlice(0, span, 0, end, True, bytes(span.num_tokens * self._cell_bytes)))
        self.clear()

    def features(self, slot: int, image: int) -> torch.Tensor:
        """The features of an image whose last slice has run and whose last chunk has not."""
        return self._features[slot, image][1]

    def drop_used(self, slot: int, end: int) -> None:
        """Free the features of a slot's images that end up to position `end` of the prompt."""
        used = [key for key, (last, _) in self._features.items() if key[0] == slot and last <= end]
        for key in used:
            del self._features[key]

    def release(self, slots: Collection[int]) -> None:
        """Free all that belongs to these slots."""
        self._features = {key: kept for key, kept in self._features.items() if key[0] not in slots}
        self._open = {key: kept for key, kept in self._open.items() if key[0] not in slots}

    def clear(self) -> None:
        """Free everything."""
        self._features, self._open = {}, {}

    @property
    def num_held(self) -> int:
        """Images whose features, or whose residual streams, are on the device."""
        return len(self._features) + len(self._open)

    @property
    def _is_on_gpu(self) -> bool:
        return self._device.type == "cuda"

    @property
    def _cell_bytes(self) -> int:
        return 3 * self.tower.config.cell**2

    def _upload(self, pixels: bytes, span: ImageSpan) -> torch.Tensor:
        """The pixels [height, width, 3] uint8 on the device."""
        cell = self.tower.config.cell
        shape = (span.rows * cell, span.columns * cell, 3)
        if self._staging is not None:
            return self._staging.upload(pixels, self._device).view(shape)
        return torch.frombuffer(bytearray(pixels), dtype=torch.uint8).view(shape)


class _Staging:
    """A pinned buffer of num_bytes, through which bytes go to a GPU without a wait for its work."""

    def __init__(self, num_bytes: int) -> None:
        self._buffer = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        self._is_read = torch.cuda.Event()

    def upload(self, content: bytes, device: torch.device) -> torch.Tensor:
        """Return `content` on the device, uint8; the copy is asynchronous."""
        assert len(content) <= self._buffer.nbytes, "an image has more tokens than the tower takes"
        # The copy of the image before may still read the buffer.
        self._is_read.synchronize()
        ctypes.memmove(self._buffer.data_ptr(), content, len(content))
        copied = self._buffer[: len(content)].to(device, non_blocking=True)
        self._is_read.record()
        return copied
