"""Products on a CPU in which a row has the same bits for every number of rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_mtp.ops.fp8 import FP8_BLOCK, dequantize
from compiled_mtp.ops.k_splits import add_tree
from compiled_mtp.ops.packed_weight import find_packed

# Measured: ATen's float32 product gives a row the same bits for every row count that is a multiple of 4, and
# other bits at 1, 2, 3, 5 and 7 rows.
ROW_UNIT = 4
# ATen computes a `bmm` of fewer multiplications per matrix by another routine, with other bits (torch 2.13).
_LEAST_MULTIPLICATIONS = 400
WEIGHT_ROWS_PER_CAST = 8192
# Measured on inputs whose exact sums are 0, so that only rounding errors remain (torch 2.13 and 2.15, AVX-512
# with bfloat16): ATen's bfloat16 product gives a row the same bits for every count of _LEAST_ROWS or more
# rows, and a column the same bits next to any other columns, if the weight has at least _LEAST_SIDE rows and
# columns. A single row or a smaller weight may give other bits.
_LEAST_ROWS = 2
_LEAST_SIDE = 64


def bfloat16_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return x [M, K] @ weight [N, K].T, all bfloat16, rounded once."""
    rows, (n, k) = x.shape[0], weight.shape
    if n < _LEAST_SIDE or k < _LEAST_SIDE:
        missing = max(_LEAST_SIDE - k, 0)
        x, weight = F.pad(x, (0, missing)), F.pad(weight, (0, missing, 0, max(_LEAST_SIDE - n, 0)))
    y = F.linear(x.expand(_LEAST_ROWS, -1) if rows == 1 else x, weight)
    return y if y.shape == (rows, n) else y[:rows, :n].contiguous()


def product(x: Tensor, weight: Tensor, weight_scale: Tensor | None) -> Tensor:
    """Return x [M, K] @ weight [N, K].T in float32; weight_scale: the block factors of an FP8 weight."""
    packed = find_packed(weight)
    if packed is not None:
        return packed.product(x.float())
    padded = _padded(x)
    if weight.dtype == torch.float32:
        return _first(F.linear(padded, weight), x)
    y = padded.new_empty((padded.shape[0], weight.shape[0]))
    for part, values in _casts(weight, weight_scale):
        y[:, part] = F.linear(padded, values)
    return _first(y, x)


def product_in_k_splits(x: Tensor, weight: Tensor, weight_scale: Tensor | None, k_splits: int) -> Tensor:
    """Return `product`, computed in `k_splits` equal splits of K that are added as a tree.

    Measured: `bmm` gives the product of a split the same bits for every number of splits and wherever its
    columns lie. A packed weight does too: each of its splits is packed as a matrix.
    """
    packed = find_packed(weight)
    if packed is not None:
        assert len(packed.matrices) == k_splits
        return packed.product(x.float())
    a_row = max(1, weight.numel() // k_splits)
    padded = _padded(x, -(-_LEAST_MULTIPLICATIONS // a_row)).unflatten(1, (k_splits, -1)).transpose(0, 1)
    y = padded.new_empty((padded.shape[1], weight.shape[0]))
    casts = ((slice(None), weight),) if weight.dtype == torch.float32 else _casts(weight, weight_scale)
    for part, values in casts:
        y[:, part] = add_tree(torch.bmm(padded, values.unflatten(1, (k_splits, -1)).permute(1, 2, 0)))
    return _first(y, x)


def _padded(x: Tensor, least: int = 0) -> Tensor:
    """Return x in float32, with rows of zeros up to a multiple of ROW_UNIT that is at least `least`."""
    rows = x.shape[0]
    missing = max(rows, least) - rows
    missing += -(rows + missing) % ROW_UNIT
    return F.pad(x.float(), (0, 0, 0, missing)) if missing else x.float()


def _first(y: Tensor, x: Tensor) -> Tensor:
    """Return the first rows of y, as many as x has."""
    return y if y.shape[0] == x.shape[0] else y[: x.shape[0]]


def _casts(weight: Tensor, weight_scale: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of weight rows with their float32 values: a copy of all rows may not fit in memory."""
    for first in range(0, weight.shape[0], WEIGHT_ROWS_PER_CAST):
        part = slice(first, first + WEIGHT_ROWS_PER_CAST)
        if weight_scale is None:
            yield part, weight[part].float()
        else:
            first_scale = first // FP8_BLOCK
            scales = weight_scale[first_scale : first_scale + WEIGHT_ROWS_PER_CAST // FP8_BLOCK]
            yield part, dequantize(weight[part], scales)
