"""Weights of a CPU in half precision, packed for its products, where that is exact.

A checkpoint's bfloat16 has 8 significant bits and half precision 11, so but for its range a matrix fits, and
a power of two moves it there. Products read half of the bytes and come from a library that packs nothing in a
call; sums are float32's, in another order than ATen's.

Measured (AVX2, weights not in the caches, 4 rows): 86 us where ATen takes 390 for [1536, 256], 51 and 80 for
[256, 512]. A row has the same bits among 3, 4, 8 .. 28 rows and with every number of threads, but not among
1, 2, 7 or 32, so rows go in pieces. A column has the same bits beside any others: ranks may hold some each.

What is summed in shares of K (ops/k_splits.py) is packed by shares, each a matrix of its own. Of [256, 512]
four take 53 us where one takes 24, and those of ATen 106.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_mtp.ops.k_splits import add_tree
from compiled_mtp.ops.numerics import number

# What one call multiplies at most.
MOST_ROWS = 24
# Rows of a call come in multiples of this.
ROW_UNIT = 4
# Of the weights that are packed: smaller ones gain nothing, and the packed ones lie beside them, half as
# large.
LEAST_ELEMENTS, MOST_ELEMENTS = 1 << 17, 1 << 23
_LARGEST_EXPONENT = 15  # of half precision: its largest number is 2 ** 16 - 32


class PackedWeight(NamedTuple):
    """matrices: what the library made of weight / factor, a power of two, of each share of its columns;
    least_rows: of a call, at most ROW_UNIT."""

    matrices: tuple[Any, ...]
    factor: float
    least_rows: int = ROW_UNIT

    def product(self, x: Tensor) -> Tensor:
        """x [M, K] float32 times the weight's transpose, [M, N], the shares' products added as a tree."""
        rows = x.shape[0]
        count = self.least_rows if rows <= self.least_rows else -(-rows // ROW_UNIT) * ROW_UNIT
        # A power of two changes no bit: it multiplies what is shorter, and a single row as it is repeated.
        if rows == 1:
            padded = x.expand(count, -1).mul(number(self.factor))
        else:
            padded = x.mul(number(self.factor))
            padded = padded if count == rows else F.pad(padded, (0, 0, 0, count - rows))
        if count <= MOST_ROWS:
            y = self._multiply(padded)
        else:
            y = torch.cat([self._multiply(piece) for piece in padded.split(MOST_ROWS)])
        return y if count == rows else y[:rows]

    def _multiply(self, x: Tensor) -> Tensor:
        """`product` of as many rows as the library takes."""
        multiply: Any = torch.fbgemm_linear_fp16_weight_fp32_activation
        if len(self.matrices) == 1:
            y: Tensor = multiply(x, self.matrices[0], None)
            return y
        k_splits = x.unflatten(1, (len(self.matrices), -1)).transpose(0, 1).contiguous().unbind()
        return add_tree([multiply(share, m, None) for share, m in zip(k_splits, self.matrices, strict=True)])


def find_packed(weight: Tensor) -> PackedWeight | None:
    """What `pack` has kept with this very tensor."""
    found: PackedWeight | None = getattr(weight, "packed", None)
    return found


def may_pack(weight: Tensor, elements: int) -> bool:
    """Whether `pack` may be tried: not for a weight that is not float32 or of which the whole, of so many
    elements, is small or large, nor where the library is missing."""
    has_library = "fbgemm" in torch.backends.quantized.supported_engines
    return has_library and weight.dtype == torch.float32 and LEAST_ELEMENTS <= elements <= MOST_ELEMENTS


def largest_exponent(weight: Tensor) -> int:
    """That of the largest of the weight's numbers, which decides the factor; 0 where that is not finite."""
    largest = weight.abs().max()
    return int(torch.frexp(largest)[1]) if torch.isfinite(largest) else 0


def pack(weight: Tensor, k_splits: int = 1, exponent: int | None = None) -> bool:
    """Keep `weight` [N, K] packed with the tensor, for `find_packed`; returns whether it could be done.

    In so many equal shares of K. exponent: `largest_exponent` of the whole of which the weight is a piece, if
    it is one. Not for one that is not exact in half precision, nor where the library gives a row other bits
    beside other rows. The weight must not change afterwards.
    """
    factor = 2.0 ** ((largest_exponent(weight) if exponent is None else exponent) - _LARGEST_EXPONENT)
    scaled = weight / factor
    # The library would take an infinite weight for the largest number of half precision.
    if not torch.equal(scaled.half().float(), scaled) or torch.isinf(scaled).any():
        return False
    try:
        # Torch calls both functions deprecated; the versions that we take have them, and another goes on
        # without. The operator `quantized::linear_dynamic_fp16` does the same, and takes 17 us longer a call.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            columns = scaled.chunk(k_splits, dim=1)
            matrices = tuple([torch.fbgemm_pack_gemm_matrix_fp16(share.contiguous()) for share in columns])
            packed = PackedWeight(matrices, factor)
            least = _least_rows(packed, weight.shape[1])
            if least is None:
                return False
    except (AttributeError, RuntimeError, TypeError):
        return False
    setattr(weight, "packed", packed._replace(least_rows=least))  # noqa: B010
    return True


def unpack(weight: Tensor) -> None:
    """Forget what `pack` has kept, if it has."""
    setattr(weight, "packed", None)  # noqa: B010


def _least_rows(packed: PackedWeight, columns: int) -> int | None:
    """The fewest rows of a call among which a row has the bits that it has among every number of rows that
    one call may have; None where they are not the same from ROW_UNIT on."""
    x = torch.randn(MOST_ROWS, columns, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    expected = packed.product(x)
    least = None
    for count in (*range(MOST_ROWS - ROW_UNIT, ROW_UNIT, -ROW_UNIT), *range(ROW_UNIT, 0, -1)):
        alone = packed._replace(least_rows=min(count, ROW_UNIT)).product(x[:count])
        if not torch.equal(alone, expected[:count]):
            break
        least = count if count <= ROW_UNIT else None
    return least
