"""The products on a CPU: the quantised activations multiplied out, then float32 products.

Both routes of a weight, in FP8 or multiplied out at load, compute the same.
"""

from __future__ import annotations

from torch import Tensor

from compiled_mtp.ops.cpu_product import product
from compiled_mtp.ops.fp8 import FP8_BLOCK, quantized_values
from compiled_mtp.ops.k_splits import add_splits, count_k_splits
from compiled_mtp.ops.linear_w8a8.config import parts_dtype


def linear_w8a8(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor | None, out_float32: bool
) -> Tensor:
    y = product(quantized_values(x, x_scale), weight, weight_scale)
    return y if out_float32 else y.bfloat16()


def linear_w8a8_partials(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor | None,
    count: int,
    whole_k: int,
    out_float32: bool,
    stacked: bool,
) -> Tensor:
    values, k = quantized_values(x, x_scale), x.shape[1]
    length = (whole_k or k) // count_k_splits(whole_k or k)
    k_splits = []
    for first in range(0, k, length):
        columns = slice(first, first + length)
        blocks = slice(first // FP8_BLOCK, (first + length) // FP8_BLOCK)
        scale = None if weight_scale is None else weight_scale[:, blocks]
        k_splits.append(product(values[:, columns], weight[:, columns], scale))
    partials = add_splits(k_splits, count, stacked)
    return partials if stacked else partials.to(parts_dtype(weight, count, whole_k, out_float32))
