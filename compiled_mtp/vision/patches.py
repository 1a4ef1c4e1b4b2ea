"""How an image becomes patches: its size, and the order of their rows and values."""

from __future__ import annotations

import math

import torch

from compiled_mtp.errors import fail
from compiled_mtp.model_config import MOST_ASPECT, VisionConfig


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


def patchify(pixels: torch.Tensor, vision: VisionConfig) -> torch.Tensor:
    """Return the patches [N, patch_values] float32 of an image [height, width, 3] uint8.

    Rows lie in blocks of merge_size by merge_size patches, block row by block row; values of a patch by
    channel, time, row and column. An image is the same at every time.
    """
    size, merge = vision.patch_size, vision.merge_size
    mean, std = pixels.new_tensor([vision.mean, vision.std], dtype=torch.float32).unbind()
    values = (pixels.float() / 255 - mean) / std
    rows, columns = pixels.shape[0] // vision.cell, pixels.shape[1] // vision.cell
    blocks = values.view(rows, merge, size, columns, merge, size, 3).permute(0, 3, 1, 4, 6, 2, 5)
    times = blocks.unsqueeze(5).expand(*blocks.shape[:5], vision.temporal_patch_size, size, size)
    return times.reshape(-1, vision.patch_values)
