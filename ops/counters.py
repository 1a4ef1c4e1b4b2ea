"""Counters that are zero between launches: programs of one launch wait for each other by them."""

from __future__ import annotations

import functools

import torch

MAX_COUNTERS = 1 << 16


@functools.cache
def persistent_counters(device: torch.device) -> torch.Tensor:
    return torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=device)


def zero_counters(device: torch.device) -> torch.Tensor:
    """Return the device's counters; launches that share them must be on one stream.

    Graph capture only records the zeroing of new memory: counters made during a capture are not shared.
    """
    made = persistent_counters.cache_info().currsize > 0
    if not made and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=device)
    return persistent_counters(device)
