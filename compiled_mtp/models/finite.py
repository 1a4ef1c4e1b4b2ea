"""Finds weights with NaN or infinity at load time, when the tensor can still be named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch

Name = TypeVar("Name")


@torch.no_grad()
def find_not_finite(tensors: Mapping[Name, torch.Tensor]) -> list[Name]:
    """The names of the tensors with an element that is NaN or infinite.

    Runs one reduction per tensor on its device and reads all results at once. Only FP8 tensors take temporary
    memory.
    """
    if not tensors:
        return []
    flags = torch.stack([_is_finite(tensor) for tensor in tensors.values()]).tolist()
    return [name for name, is_finite in zip(tensors, flags, strict=True) if not is_finite]


def _is_finite(tensor: torch.Tensor) -> torch.Tensor:
    """Whether all elements are finite: bool [] on the tensor's device."""
    if tensor.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=tensor.device)
    if tensor.dtype == torch.float8_e4m3fn:
        # e4m3fn has no infinity, and one NaN per sign: all bits set except the sign bit.
        return ((tensor.view(torch.uint8) & 0x7F) != 0x7F).all()
    # Minimum and maximum are both NaN if any element is.
    low, high = torch.aminmax(tensor)
    return low.isfinite() & high.isfinite()
