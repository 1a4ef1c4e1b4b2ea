"""Element-wise functions whose bits do not depend on where an element lies in its tensor.

ATen's float32 `sigmoid`, `silu` and `softplus` give other bits in the vector body than in the scalar tail,
and so depend on an element's flat index and on the number of threads. `exp` and `log1p` do not (measured),
so these are built from them, in place where they can be: with a few rows a call takes longer than its
arithmetic. A test holds every function here to that on tensors of more than 65,536
elements.
"""

from __future__ import annotations

import torch


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x)), float32 in, float32 out."""
    return torch.neg(x).exp_().add_(1.0).reciprocal_()


def silu(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(x), float32 in, float32 out."""
    return torch.div(x, torch.neg(x).exp_().add_(1.0))


def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + exp(x)), equal to x above 20 as in torch, float32 in, float32 out."""
    # log1p(exp(20)) is 20 in float32.
    return torch.maximum(x, torch.clamp(x, max=20.0).exp_().log1p_())
