"""Which FP8 weights stay as they are, and how a loader multiplies out the others."""

from __future__ import annotations

import torch

from compiled_mtp.ops import fp8


def below(names: frozenset[str], prefix: str) -> frozenset[str]:
    """The names that begin with `prefix`, without it: what a module passes on to a part of itself."""
    return frozenset(name.removeprefix(prefix) for name in names if name.startswith(prefix))


def multiplies_fp8(device: torch.device) -> bool:
    """Whether the operators read FP8 weights as they are on `device`: a GPU from compute capability 8.9.

    A CPU's reference would multiply a weight out at every call, and older GPUs cannot convert e4m3: there
    the loader multiplies out, once.
    """
    return fp8.converts_fp8(device)


def dequantize(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """An FP8 weight times its block scales: `weight` [N,K] float8_e4m3fn, `scale` [ceil(N/128),ceil(K/128)].

    The product is taken in float32 and rounded once to `dtype`; edge blocks may be partial. Despite its
    stored name, `scale_inv`, the scale is a factor.
    """
    out = torch.empty(weight.shape, dtype=dtype)
    # A block row at a time: a float32 copy of a whole weight may not fit.
    for block, factors in enumerate(scale.split(1)):
        rows = slice(block * fp8.FP8_BLOCK, (block + 1) * fp8.FP8_BLOCK)
        out[rows] = fp8.dequantize(weight[rows], factors)
    return out
