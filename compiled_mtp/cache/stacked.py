"""One allocation for what every layer has of its own, so that all of a request's rows move in one copy."""

from __future__ import annotations

import math

import torch

# The alignment that allocators give, and kernels may count on.
_ALIGNMENT = 256


def stack(count: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory [count, *shape] of which every [index] is contiguous and aligned as one of its own would be.

    Its contents are not set: a CPU gives no memory before it is written.
    """
    size = math.prod(shape)
    step = _ALIGNMENT // dtype.itemsize
    memory = torch.empty((count, -(-size // step) * step), dtype=dtype, device=device)
    return memory[:, :size].view(count, *shape)
