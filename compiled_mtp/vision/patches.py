"""The patches of an image: the order of their rows and of the values in a row."""

from __future__ import annotations

import torch

from compiled_mtp.model_config import VisionConfig


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
