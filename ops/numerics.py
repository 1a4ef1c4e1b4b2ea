"""Functions whose bits do not depend on where an element lies in its tensor, and sums as a tree.

ATen's float32 `sigmoid`, `silu` and `softplus` give other bits in the vector body than in the scalar tail,
and so depend on an element's flat index and on the number of threads. `exp` and `log1p` do not (measured),
so these are built from them. A test holds every function here to that on tensors of more than 65,536
elements.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x)), float32 in, float32 out."""
    return 1.0 / (1.0 + torch.exp(-x))


def silu(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(x), float32 in, float32 out."""
    return x / (1.0 + torch.exp(-x))


def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + exp(x)), equal to x above 20 as in torch, float32 in, float32 out."""
    return torch.where(x > 20.0, x, torch.log1p(torch.exp(torch.clamp(x, max=20.0))))


def add_tree(parts: Sequence[torch.Tensor] | torch.Tensor) -> torch.Tensor:
    """((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)) of 1, 2, 4 or 8 parts."""
    half = len(parts) // 2
    return parts[0] if half == 0 else add_tree(parts[:half]) + add_tree(parts[half:])
