"""Runs the vision tower for the prompts of slots, in slices, and keeps their features until they are read."""

from __future__ import annotations

from collections.abc import Collection

import torch

from compiled_mtp.plan import EncodeSlice
from compiled_mtp.vision.tower import VisionTower


class Encoder:
    """The features of images, by slot and number in the prompt: [tokens, hidden_size] on the device.

    They exist from the slice with the tower's last layer to the prompt chunk with the image's last token, or
    until the slot is released. A prompt that is prefilled again encodes its images again, to the same bits.
    """

    def __init__(self, tower: VisionTower) -> None:
        self.tower = tower
        self._features: dict[tuple[int, int], tuple[int, torch.Tensor]] = {}
        # The residual streams of images that are in the tower.
        self._open: dict[tuple[int, int], torch.Tensor] = {}

    @torch.no_grad()
    def encode(self, slot: int, part: EncodeSlice) -> None:
        """Run a slice for an image of a slot's prompt; slices of one image come in order."""
        key, span, config = (slot, part.image), part.span, self.tower.config
        if part.first_layer == 0:
            shape = (span.rows * config.cell, span.columns * config.cell, 3)
            self._open[key] = self.tower.embed(self._upload(part.pixels).view(shape))
        x = self.tower.run(self._open.pop(key), span.rows, span.columns, part.first_layer, part.end_layer)
        if part.end_layer < config.depth:
            self._open[key] = x
            return
        self._features[key] = (span.end, self.tower.merge(x))

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

    def _upload(self, pixels: bytes) -> torch.Tensor:
        device = self.tower.pos_embed.weight.device
        host = torch.frombuffer(bytearray(pixels), dtype=torch.uint8)
        # The caching host allocator keeps a pinned block until the copy that reads it has run.
        return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
