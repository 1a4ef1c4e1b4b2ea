"""The products on a CPU: the quantised activations multiplied out, then float32 products.

Both routes of a weight, in FP8 or multiplied out at load, compute the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_mtp.ops.cpu_product import product
from compiled_mtp.ops.fp8 import FP8_BLOCK, quantized_values
from compiled_mtp.ops.linear_w8a8.config import parts_dtype
from compiled_mtp.ops.shares import add_tree, share_count


def linear_w8a8(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor | None, out_float32: bool
) -> Tensor:
    y = product(quantized_values(x, x_scale), weight, weight_scale)
    return y if out_float32 else y.bfloat16()


def linear_w8a8_parts(
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
    length = (whole_k or k) // share_count(whole_k or k)
    shares = []
    for first in range(0, k, length):
        columns = slice(first, first + length)
        blocks = slice(first // FP8_BLOCK, (first + length) // FP8_BLOCK)
        scale = None if weight_scale is None else weight_scale[:, blocks]
        shares.append(product(values[:, columns], weight[:, columns], scale))
    size = len(shares) // count
    parts = torch.stack([add_tree(shares[first : first + size]) for first in range(0, len(shares), size)])
    return parts.flatten(0, 1) if stacked else parts.to(parts_dtype(weight, count, whole_k, out_float32))
