"""FP8 weights: e4m3 values with one factor for each block of 128 by 128, as the FP8 releases store them."""

from __future__ import annotations

import torch

FP8_BLOCK = 128


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the factors of a weight [..., N, K]: [..., ceil(N/128), ceil(K/128)]."""
    return (*shape[:-2], *(-(-size // FP8_BLOCK) for size in shape[-2:]))


def below(names: frozenset[str], prefix: str) -> frozenset[str]:
    """The names that begin with `prefix`, without it: what a module passes on to a part of itself."""
    return frozenset(name.removeprefix(prefix) for name in names if name.startswith(prefix))


def multiplies_fp8(device: torch.device) -> bool:
    """Whether the operators read FP8 weights as they are on `device`: a GPU from compute capability 8.9.

    A CPU's reference would multiply a weight out at every call, and older GPUs cannot convert e4m3: there
    the loader multiplies out, once.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def dequantize(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """An FP8 weight times its block scales: `weight` [N,K] float8_e4m3fn, `scale` [ceil(N/128),ceil(K/128)].

    The product is taken in float32 and rounded once to `dtype`; edge blocks may be partial. Despite its
    stored name, `scale_inv`, the scale is a factor.
    """
    out = torch.empty(weight.shape, dtype=dtype)
    columns = scale.float().repeat_interleave(FP8_BLOCK, dim=1)[:, : weight.shape[1]]
    for block, factor in enumerate(columns):
        rows = slice(block * FP8_BLOCK, (block + 1) * FP8_BLOCK)
        out[rows] = weight[rows].float() * factor
    return out
