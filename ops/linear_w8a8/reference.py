"""The specification of `linear_w8a8`, and what runs on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from compiled_mtp.ops.fp8 import FP8_BLOCK
from compiled_mtp.ops.shares import add_tree, share_count


def sum_blocks(
    x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor
) -> torch.Tensor:
    """[M, N] in float32: a product for each 128 columns, times both factors, added in order.

    Row by row on purpose: a CPU's product of few rows has other bits than one of many.
    """
    factors = weight_scale.repeat_interleave(FP8_BLOCK, 0)[: weight.shape[0]]
    values, x_values = weight.float(), x.float()
    total = x_values.new_zeros((x.shape[0], weight.shape[0]))
    for block in range(x.shape[1] // FP8_BLOCK):
        columns = slice(block * FP8_BLOCK, (block + 1) * FP8_BLOCK)
        product = (x_values[:, None, columns] * values[None, :, columns]).sum(-1)
        total = total + product * (x_scale[:, block, None] * factors[None, :, block])
    return total


def linear_w8a8_reference(
    x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor
) -> torch.Tensor:
    return sum_blocks(x, x_scale, weight, weight_scale).bfloat16()


def linear_w8a8_parts_reference(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    count: int,
    whole_shape: Sequence[int] | None = None,
) -> torch.Tensor:
    whole_k = whole_shape[1] if whole_shape else x.shape[1]
    length = whole_k // share_count(whole_k)
    shares = []
    for first in range(0, x.shape[1], length):
        columns = slice(first, first + length)
        blocks = slice(first // FP8_BLOCK, (first + length) // FP8_BLOCK)
        pieces = (x[:, columns], x_scale[:, blocks], weight[:, columns], weight_scale[:, blocks])
        shares.append(sum_blocks(*pieces))
    size = len(shares) // count
    parts = torch.stack([add_tree(shares[first : first + size]) for first in range(0, len(shares), size)])
    return parts.bfloat16() if count == 1 else parts
