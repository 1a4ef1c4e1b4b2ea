"""One allocation for a tensor that every layer has, so that one copy moves a request's rows of all layers."""

from __future__ import annotations

import math

import torch

# Bytes; allocators align as much, and kernels may rely on it.
_ALIGNMENT = 256


def stack(
    count: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, is_zero: bool
) -> torch.Tensor:
    """Return memory [count, *shape], zeros or not set; every [index] is contiguous and aligned like an
    allocation of its own. A CPU backs it with memory only as it is written.
    """
    size = math.prod(shape)
    step = _ALIGNMENT // dtype.itemsize
    make = torch.zeros if is_zero else torch.empty
    memory = make((count, -(-size // step) * step), dtype=dtype, device=device)
    return memory[:, :size].view(count, *shape)
