"""FP8 weights: e4m3 values with a float32 factor for each block of 128 by 128, as the FP8 releases store
them."""

from __future__ import annotations

import torch

FP8_BLOCK = 128


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the factors of a weight [..., N, K]: [..., ceil(N/128), ceil(K/128)]."""
    return (*shape[:-2], *(-(-size // FP8_BLOCK) for size in shape[-2:]))


def dequantize(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The float32 values of an FP8 weight [N, K] with factors [ceil(N/128), ceil(K/128)]."""
    n, k = weight.shape
    factors = scale.float().repeat_interleave(FP8_BLOCK, 0)[:n].repeat_interleave(FP8_BLOCK, 1)[:, :k]
    return weight.float() * factors


def converts_fp8(device: torch.device) -> bool:
    """Whether a GPU's kernels can convert e4m3: from compute capability 8.9."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
