"""Element-wise functions whose bits do not depend on where an element lies in its tensor.

ATen's float32 `sigmoid` and `silu` give other bits in the vector body than in the scalar tail, and so depend
on an element's flat index and on the number of threads: here every element goes through the body. One call of
theirs then does what four of simpler functions would, and with a few rows a call takes longer than its
arithmetic. `logsigmoid` reads its tail as a vector (measured). A test holds every function here to that on
tensors of more than 65,536 elements.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F

# Of the widest vectors twice as many, which a step of the body takes.
_BODY_STEP = 64
# ATen shares longer tensors out among threads, at places that are no steps of the body.
_MOST_AT_ONCE = 32768 - _BODY_STEP


@functools.lru_cache(maxsize=1024)
def number(value: float) -> torch.Tensor:
    """A float32 number for CPU tensors, which torch would convert anew in every call: never to be written."""
    return torch.tensor(value, dtype=torch.float32)


def _in_body(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """`function` of every element of x, in the vector body."""
    if x.numel() <= _MOST_AT_ONCE and x.shape[-1] % _BODY_STEP == 0:
        return function(x)
    flat = F.pad(x.reshape(-1), (0, -x.numel() % _BODY_STEP))
    parts = [function(part) for part in flat.split(_MOST_AT_ONCE)]
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[: x.numel()].view(x.shape)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x)), float32 in, float32 out."""
    return _in_body(torch.sigmoid, x)


def silu(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(x), float32 in, float32 out."""
    return _in_body(F.silu, x)


def log_sigmoid(x: torch.Tensor) -> torch.Tensor:
    """log(sigmoid(x)), float32 in, float32 out."""
    return F.logsigmoid(x)


def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + exp(x)), float32 in, float32 out."""
    return torch.neg(log_sigmoid(torch.neg(x)))
