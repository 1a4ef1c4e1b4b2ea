"""Whether weights are numbers at all: a check at load, where the tensor can still be named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch

Name = TypeVar("Name")


@torch.no_grad()
def find_not_finite(tensors: Mapping[Name, torch.Tensor]) -> list[Name]:
    """The names of those with an element that is NaN or infinite.

    One reduction a tensor where it lies, and one look at all results. Takes no memory but for FP8.
    """
    if not tensors:
        return []
    flags = torch.stack([_is_finite(tensor) for tensor in tensors.values()]).tolist()
    return [name for name, is_finite in zip(tensors, flags, strict=True) if not is_finite]


def _is_finite(tensor: torch.Tensor) -> torch.Tensor:
    """A bool [] on the tensor's device."""
    if tensor.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=tensor.device)
    if tensor.dtype == torch.float8_e4m3fn:
        # It has no infinity, and one NaN of either sign: all bits but the sign's.
        return ((tensor.view(torch.uint8) & 0x7F) != 0x7F).all()
    # A NaN is passed on by both ends.
    low, high = torch.aminmax(tensor)
    return low.isfinite() & high.isfinite()
