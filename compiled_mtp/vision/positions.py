"""Rotary positions of a prompt's tokens on three axes: time, row and column."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from compiled_mtp.plan import ImageSpan


def rotary_positions(images: Sequence[ImageSpan], start: int, end: int) -> torch.Tensor:
    """Return the positions [3, end - start] int64 of tokens `start` to `end` of a prompt.

    images: at least those that begin before `end`, in order. A token of text has one position on all axes,
    the next after the largest before it. The tokens of an image share a time, and have a row and a column
    each; token -1, before the prompt, has position -1. Source: `get_rope_index` of Qwen3_5Model in
    transformers.
    """
    index = torch.arange(start, end)
    positions = index.expand(3, -1).clone()
    shift = 0
    for image in images:
        within = index - image.start
        is_inside = (within >= 0) & (within < image.num_tokens)
        first = image.start + shift
        axes = (torch.zeros_like(within), within // image.columns, within % image.columns)
        positions = torch.where(is_inside, first + torch.stack(axes), positions)
        step = image.extent - image.num_tokens
        positions = torch.where(within >= image.num_tokens, positions + step, positions)
        shift += step
    return positions
