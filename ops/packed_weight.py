"""CPU weights packed in half precision, if that is exact.

A checkpoint's bfloat16 has 8 significant bits, half precision 11: a matrix fits except for its range, and a
power of two moves it into the range. Products then read half of the bytes, from a library (FBGEMM) that packs
nothing in a call. Sums are in float32, in another order than ATen's.

Measured (AVX2, weights not in the caches, 4 rows): 86 us for [1536, 256] (ATen: 390) and 51 us for [256, 512]
(ATen: 80). A row has the same bits in calls of 3, 4, 8 .. 28 rows and with every number of threads, but not
in calls of 1, 2, 7 or 32 rows: `product` pads rows and divides them among calls. A column has the same bits
next to any other columns, so that ranks may hold some columns each.

A weight whose products are summed in K splits (ops/k_splits.py) is packed as one matrix per split. For [256,
512] four splits take 53 us (ATen: 106), one takes 24 us.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_mtp.ops.k_splits import add_tree
from compiled_mtp.ops.numerics import number

# The most rows of one call.
MOST_ROWS = 24
# Rows of a call are padded to a multiple of this.
ROW_UNIT = 4
# Sizes of the weights that are packed: smaller ones gain nothing, and for larger ones the packed copy, half
# as large as the weight, takes too much memory.
LEAST_ELEMENTS, MOST_ELEMENTS = 1 << 17, 1 << 23
_LARGEST_EXPONENT = 15  # of half precision: its largest number is 2 ** 16 - 32


class PackedWeight(NamedTuple):
    """A weight as the library packs it.

    matrices: weight / factor, packed, one per K split. factor: a power of two. least_rows: the fewest rows of
    a call, at most ROW_UNIT.
    """

    matrices: tuple[Any, ...]
    factor: float
    least_rows: int = ROW_UNIT

    def product(self, x: Tensor) -> Tensor:
        """Return x [M, K] float32 times the weight's transpose, [M, N], with the K splits added as a tree."""
        rows = x.shape[0]
        count = self.least_rows if rows <= self.least_rows else -(-rows // ROW_UNIT) * ROW_UNIT
        # The factor, a power of two, changes no bit. Multiply before padding, which lengthens x; for a single
        # row the same call writes its repetitions.
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
        """Return the product of at most MOST_ROWS padded rows."""
        multiply: Any = torch.fbgemm_linear_fp16_weight_fp32_activation
        if len(self.matrices) == 1:
            y: Tensor = multiply(x, self.matrices[0], None)
            return y
        k_splits = x.unflatten(1, (len(self.matrices), -1)).transpose(0, 1).contiguous().unbind()
        return add_tree([multiply(share, m, None) for share, m in zip(k_splits, self.matrices, strict=True)])


def find_packed(weight: Tensor) -> PackedWeight | None:
    """Return what `pack` has kept with this tensor object, None without."""
    found: PackedWeight | None = getattr(weight, "packed", None)
    return found


def may_pack(weight: Tensor, elements: int) -> bool:
    """Return whether to try `pack`: the library exists, and `weight` is float32 and of a suitable size.

    elements: the size of the whole weight, if `weight` is a shard.
    """
    has_library = "fbgemm" in torch.backends.quantized.supported_engines
    return has_library and weight.dtype == torch.float32 and LEAST_ELEMENTS <= elements <= MOST_ELEMENTS


def largest_exponent(weight: Tensor) -> int:
    """Return the exponent of the weight's largest magnitude, which decides the factor; 0 if not finite."""
    largest = weight.abs().max()
    return int(torch.frexp(largest)[1]) if torch.isfinite(largest) else 0


def pack(weight: Tensor, k_splits: int = 1, exponent: int | None = None) -> bool:
    """Pack `weight` [N, K] and keep the result with the tensor for `find_packed`; return False on failure.

    k_splits: number of K splits. exponent: `largest_exponent` of the whole weight, if `weight` is a shard.
    Fails if the weight is not exact in half precision, or if the library gives a row other bits next to other
    rows. The weight must not change afterwards.
    """
    factor = 2.0 ** ((largest_exponent(weight) if exponent is None else exponent) - _LARGEST_EXPONENT)
    scaled = weight / factor
    # The library would take an infinite weight for the largest number of half precision.
    if not torch.equal(scaled.half().float(), scaled) or torch.isinf(scaled).any():
        return False
    try:
        # torch warns that both functions are deprecated. The versions that we support have them; with a
        # version that has not, weights stay unpacked. The operator `quantized::linear_dynamic_fp16` computes
        # the same, but takes 17 us longer per call.
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
    """Remove what `pack` has kept with the tensor, if anything."""
    setattr(weight, "packed", None)  # noqa: B010


def _least_rows(packed: PackedWeight, columns: int) -> int | None:
    """Return the fewest rows of a call in which a row has the bits that it has in all larger calls.

    Returns None if the bits differ between calls of ROW_UNIT to MOST_ROWS rows.
    """
    x = torch.randn(MOST_ROWS, columns, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    expected = packed.product(x)
    least = None
    for count in (*range(MOST_ROWS - ROW_UNIT, ROW_UNIT, -ROW_UNIT), *range(ROW_UNIT, 0, -1)):
        alone = packed._replace(least_rows=min(count, ROW_UNIT)).product(x[:count])
        if not torch.equal(alone, expected[:count]):
            break
        least = count if count <= ROW_UNIT else None
    return least
