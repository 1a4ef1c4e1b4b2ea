"""FP8 weights: e4m3 values with a float32 factor for each block of 128 by 128, as the FP8 releases store
them."""

from __future__ import annotations

import torch

FP8_BLOCK = 128
LARGEST = 448.0  # of e4m3
# A group that is smaller everywhere keeps a factor that float32 can divide by.
LEAST = 1e-10
# Blocks of rows that are quantised at once: a float32 copy of a whole output projection may not fit.
_BLOCKS_AT_ONCE = 64


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the factors of a weight [..., N, K]: [..., ceil(N/128), ceil(K/128)]."""
    return (*shape[:-2], *(-(-size // FP8_BLOCK) for size in shape[-2:]))


def dequantize(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The float32 values of an FP8 weight [N, K] with factors [ceil(N/128), ceil(K/128)]."""
    n, k = weight.shape
    factors = scale.float().repeat_interleave(FP8_BLOCK, 0)[:n].repeat_interleave(FP8_BLOCK, 1)[:, :k]
    return weight.float() * factors


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3 values [M, K], factors [M, K / 128]) of rows [M, K]: a factor is the largest magnitude of 128
    columns over 448."""
    rows, columns = x.shape
    groups = x.float().reshape(rows, columns // FP8_BLOCK, FP8_BLOCK)
    # Times, since torch's division by a number is another operation on a GPU than on a CPU.
    scale = groups.abs().amax(-1).clamp(min=LEAST) * (1 / LARGEST)
    # No value is above 448 by more than a rounding of the division, which e4m3 rounds back.
    return (groups / scale[..., None]).to(torch.float8_e4m3fn).reshape(rows, columns), scale


def quantized_values(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The float32 numbers [M, K] that `quantize` gave values and factors for."""
    groups = values.float().view(len(values), -1, FP8_BLOCK)
    return (groups * scale[..., None]).view(values.shape)


def quantize_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight [N, K] in e4m3 and its factors [ceil(N/128), ceil(K/128)]: a block's largest magnitude / 448.

    Every value comes back within half a step of e4m3; a block of zeros has the factor 1.
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
        # No value is above 448 by more than a rounding of the division, which e4m3 rounds back.
        quantised = (blocks / factor[:, None, :, None]).view(padded.shape)[: len(rows), :k]
        values[first * FP8_BLOCK :][: len(rows)] = quantised.to(torch.float8_e4m3fn)
    return values, scale


def converts_fp8(device: torch.device) -> bool:
    """Whether a GPU's kernels can convert e4m3: from compute capability 8.9."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
