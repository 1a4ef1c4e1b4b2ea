"""Weights of a CPU in half precision, packed for its products, where that is exact.

A checkpoint's bfloat16 has 8 significant bits and half precision 11, so but for its range a matrix fits, and
a power of two moves it there. Products read half of the bytes and come from a library that packs nothing in a
call; sums are float32's, in another order than ATen's.

Measured (AVX2, weights not in the caches, 4 rows): 86 us where ATen takes 390 for [1536, 256], 51 and 80 for
[256, 512]. A row has the same bits among 4, 8 .. 28 rows and with every number of threads, but not among 1,
2, 7 or 32, so rows go in pieces.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

# What one call multiplies at most.
MOST_ROWS = 24
# Rows of a call come in multiples of this.
ROW_UNIT = 4
# Of the weights that are packed: smaller ones gain nothing, and the packed ones lie beside them, half as
# large.
LEAST_ELEMENTS, MOST_ELEMENTS = 1 << 17, 1 << 23
_LARGEST_EXPONENT = 15  # of half precision: its largest number is 2 ** 16 - 32


class PackedWeight(NamedTuple):
    """matrix: what the library made of weight / factor; factor: a power of two."""

    matrix: Any
    factor: float

    def product(self, x: Tensor) -> Tensor:
        """x [M, K] float32 times the weight's transpose, [M, N]; M a multiple of ROW_UNIT."""
        multiply: Any = torch.fbgemm_linear_fp16_weight_fp32_activation
        pieces: list[Tensor] = [multiply(piece, self.matrix, None) for piece in x.split(MOST_ROWS)]
        return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).mul_(self.factor)


def find_packed(weight: Tensor) -> PackedWeight | None:
    """What `pack` has kept with this very tensor."""
    found: PackedWeight | None = getattr(weight, "packed", None)
    return found


def pack(weight: Tensor) -> bool:
    """Keep `weight` [N, K] packed with the tensor, for `find_packed`; returns whether it could be done.

    Not for one that is not float32, small, large, or not exact in half precision, nor where the library is
    missing or gives a row other bits beside other rows. The weight must not change afterwards.
    """
    has_library = "fbgemm" in torch.backends.quantized.supported_engines
    has_size = LEAST_ELEMENTS <= weight.numel() <= MOST_ELEMENTS
    if not has_library or weight.dtype != torch.float32 or not has_size:
        return False
    largest = weight.abs().max()
    # The library would take an infinite weight for the largest number of half precision.
    if not torch.isfinite(largest):
        return False
    _, exponent = torch.frexp(largest)
    factor = 2.0 ** (int(exponent) - _LARGEST_EXPONENT)
    scaled = weight / factor
    if not torch.equal(scaled.half().float(), scaled):
        return False
    try:
        # Torch calls both functions deprecated; the versions that we take have them, and another goes on
        # without. The operator `quantized::linear_dynamic_fp16` does the same, and takes 17 us longer a call.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            packed = PackedWeight(torch.fbgemm_pack_gemm_matrix_fp16(scaled), factor)
            if not _keeps_bits(packed, weight.shape[1]):
                return False
    except (AttributeError, RuntimeError, TypeError):
        return False
    setattr(weight, "packed", packed)  # noqa: B010
    return True


def _keeps_bits(packed: PackedWeight, columns: int) -> bool:
    """Whether a row has the same bits among every number of rows that one call may have."""
    x = torch.randn(MOST_ROWS, columns, generator=torch.Generator().manual_seed(0))
    expected = packed.product(x)
    counts = range(ROW_UNIT, MOST_ROWS, ROW_UNIT)
    return all(torch.equal(packed.product(x[:count]), expected[:count]) for count in counts)
