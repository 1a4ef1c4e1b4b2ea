"""One allocation for what every layer has of its own, so that all of a request's rows move in one copy."""

from __future__ import annotations

import math

import torch

# The alignment that allocators give, and kernels may count on.
_ALIGNMENT = 256


def stack(
    count: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, is_zero: bool
) -> torch.Tensor:
    """Memory [count, *shape], zeros or not set, of which every [index] is contiguous and aligned as one of
    its own would be. A CPU gives none of it before it is written.
    """
    size = math.prod(shape)
    step = _ALIGNMENT // dtype.itemsize
    make = torch.zeros if is_zero else torch.empty
    memory = make((count, -(-size // step) * step), dtype=dtype, device=device)
    return memory[:, :size].view(count, *shape)
