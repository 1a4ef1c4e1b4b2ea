"""Element-wise functions whose bits do not depend on where an element lies in its tensor.

ATen's float32 `sigmoid` and `silu` give other bits in the vector body than in the scalar tail: their bits
depend on an element's flat index and on the number of threads. Here padding brings every element into the
vector body. One call of `sigmoid` replaces four calls of simpler functions, and for a few rows a call takes
longer than its arithmetic. `logsigmoid` needs no padding: ATen computes its tail as a vector (measured). A
test checks every function here on tensors of more than 65,536 elements.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F

# A multiple of the elements that a step of the vector body takes, for the widest vectors too.
_BODY_STEP = 64
# ATen divides longer tensors among threads, at offsets that are not multiples of a step of the body.
_MOST_AT_ONCE = 32768 - _BODY_STEP


@functools.lru_cache(maxsize=1024)
def number(value: float) -> torch.Tensor:
    """Return a float32 number for products with CPU tensors; the caller must not write to it.

    torch would convert a Python number again in every call.
    """
    return torch.tensor(value, dtype=torch.float32)


def _in_body(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Return `function` of every element of x, computed in the vector body."""
    if x.numel() <= _MOST_AT_ONCE and x.shape[-1] % _BODY_STEP == 0:
        return function(x)
    flat = F.pad(x.reshape(-1), (0, -x.numel() % _BODY_STEP))
    parts = [function(part) for part in flat.split(_MOST_AT_ONCE)]
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[: x.numel()].view(x.shape)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Return 1 / (1 + exp(-x)) of a float32 tensor, in float32."""
    return _in_body(torch.sigmoid, x)


def silu(x: torch.Tensor) -> torch.Tensor:
    """Return x * sigmoid(x) of a float32 tensor, in float32."""
    return _in_body(F.silu, x)


def log_sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Return log(sigmoid(x)) of a float32 tensor, in float32."""
    return F.logsigmoid(x)


def softplus(x: torch.Tensor) -> torch.Tensor:
    """Return log(1 + exp(x)) of a float32 tensor, in float32."""
    return torch.neg(log_sigmoid(torch.neg(x)))
