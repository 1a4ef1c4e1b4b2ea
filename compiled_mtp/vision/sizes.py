"""The size to which an image is resized, and the parts in which the tower takes it. No torch."""

from __future__ import annotations

import math

from compiled_mtp.errors import fail
from compiled_mtp.model_config import MOST_ASPECT, VisionConfig

PART_PATCHES = 4096
"""Patches that attend to all others in one part of a layer: a layer of an image of more has several parts."""


def smart_resize(height: int, width: int, vision: VisionConfig) -> tuple[int, int]:
    """Return the height and width to which an image of height by width pixels is resized.

    Both are multiples of `vision.cell`; together they lie in least_pixels to most_pixels, except for shapes
    that whole cells do not allow. Raises ValueError for a side of more than MOST_ASPECT times the other.
    Source: `smart_resize` of transformers' Qwen2VLImageProcessor.
    """
    if max(height, width) > MOST_ASPECT * min(height, width):
        rule = f"have a longer side of at most {MOST_ASPECT} times the shorter one"
        raise fail("image", rule, f"{width} x {height} pixels", "crop it")
    cell, least, most = vision.cell, vision.least_pixels, vision.most_pixels
    # Python's round: half to even.
    new_height, new_width = round(height / cell) * cell, round(width / cell) * cell
    if new_height * new_width > most:
        shrink = math.sqrt(height * width / most)
        new_height = max(cell, math.floor(height / shrink / cell) * cell)
        new_width = max(cell, math.floor(width / shrink / cell) * cell)
    elif new_height * new_width < least:
        grow = math.sqrt(least / (height * width))
        new_height = math.ceil(height * grow / cell) * cell
        new_width = math.ceil(width * grow / cell) * cell
    return new_height, new_width


def parts_of_layer(num_patches: int) -> int:
    """Return the parts of a layer of the tower for an image of num_patches patches."""
    return -(-num_patches // PART_PATCHES)
