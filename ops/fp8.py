"""FP8 weights: e4m3 values with a float32 factor per block of 128 by 128, as the FP8 releases store them."""

from __future__ import annotations

import torch

from compiled_mtp.ops.device import capability_of

FP8_BLOCK = 128
LARGEST = 448.0  # of e4m3
# The largest magnitude of a group counts as at least this: float32 can then divide by the group's factor.
LEAST = 1e-10
# Rows of blocks that are quantised at once: a float32 copy of a whole output projection may not fit.
_BLOCKS_AT_ONCE = 64


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the factors of a weight [..., N, K]: [..., ceil(N/128), ceil(K/128)]."""
    return (*shape[:-2], *(-(-size // FP8_BLOCK) for size in shape[-2:]))


def dequantize(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the float32 values of an FP8 weight [N, K] with factors [ceil(N/128), ceil(K/128)]."""
    n, k = weight.shape
    factors = scale.float().repeat_interleave(FP8_BLOCK, 0)[:n].repeat_interleave(FP8_BLOCK, 1)[:, :k]
    return weight.float() * factors


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (e4m3 values [M, K], factors [M, K / 128]) of rows x [M, K].

    A factor is the largest magnitude of 128 columns / 448.
    """
    rows, columns = x.shape
    groups = x.float().reshape(rows, columns // FP8_BLOCK, FP8_BLOCK)
    # A multiplication: torch divides by a number in another way on a GPU than on a CPU.
    scale = groups.abs().amax(-1).clamp(min=LEAST) * (1 / LARGEST)
    # The division may exceed 448 by its rounding only, and e4m3 rounds that back to 448.
    return (groups / scale[..., None]).to(torch.float8_e4m3fn).reshape(rows, columns), scale


def quantized_values(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the float32 numbers [M, K] that the results of `quantize` stand for."""
    groups = values.float().view(len(values), -1, FP8_BLOCK)
    return (groups * scale[..., None]).view(values.shape)


def quantize_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight [N, K] in e4m3 and its factors [ceil(N/128), ceil(K/128)].

    A factor is its block's largest magnitude / 448, or 1 for a block of zeros. `dequantize` returns every
    value within half a step of e4m3.
    """
    n, k = weight.shape
    values = torch.empty((n, k), dtype=torch.float8_e4m3fn, device=weight.device)
    scale = torch.empty(scale_shape((n, k)), dtype=torch.float32, device=weight.device)
    for first in range(0, len(scale), _BLOCKS_AT_ONCE):
        rows = weight[first * FP8_BLOCK : (first + _BLOCKS_AT_ONCE) * FP8_BLOCK].float()
        padded = torch.nn.functional.pad(rows, (0, -k % FP8_BLOCK, 0, -len(rows) % FP8_BLOCK))
        blocks = padded.view(-1, FP8_BLOCK, padded.shape[1] // FP8_BLOCK, FP8_BLOCK)
        largest = blocks.abs().amax(dim=(1, 3))
        factor = torch.where(largest == 0.0, 1.0, largest / LARGEST)
        scale[first : first + len(factor)] = factor
        # The division may exceed 448 by its rounding only, and e4m3 rounds that back to 448.
        quantised = (blocks / factor[:, None, :, None]).view(padded.shape)[: len(rows), :k]
        values[first * FP8_BLOCK :][: len(rows)] = quantised.to(torch.float8_e4m3fn)
    return values, scale


def converts_fp8(device: torch.device) -> bool:
    """Return whether kernels of `device` can convert e4m3: GPUs from compute capability 8.9 on."""
    return device.type == "cuda" and capability_of(device) >= (8, 9)
