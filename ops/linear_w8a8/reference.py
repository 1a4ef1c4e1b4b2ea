"""The specifications of `linear_w8a8` and `linear_w8a8_parts`, and what runs on the CPU."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from compiled_mtp.ops.checks import fail
from compiled_mtp.ops.fp8 import FP8_BLOCK
from compiled_mtp.ops.registry import Launch, operator
from compiled_mtp.ops.shares import add_tree, part_counts, share_count
from compiled_mtp.ops.signature import F32, FP8, Remedy

Rows = Annotated[Tensor, "M K", FP8, Remedy("pass what quantize_rows gives")]
RowFactors = Annotated[Tensor, "M K//128", F32, Remedy("pass quantize_rows' factors")]
Weight = Annotated[Tensor, "N K", FP8, Remedy("use linear")]
Factors = Annotated[Tensor, "(N+127)//128 K//128", F32, Remedy("pass one factor per 128 x 128 block")]
# A fence, as linear's kernel is.
LAUNCHES = (Launch("linear_w8a8_kernel", reads_early=("weight",), is_fence=True),)


def _is_blocks(K: int) -> None:
    if K == 0 or K % FP8_BLOCK:
        raise fail("x", f"have a multiple of {FP8_BLOCK} columns", K, "use linear")


def _count_fits(count: int, whole_k: int, K: int) -> None:
    _is_blocks(K)
    counts = part_counts(K, whole_k or K)
    if count not in counts:
        raise fail("count", f"be one of {counts} for this weight", count, "pass how many programs may sum it")


def _parts(x: Tensor, weight: Tensor, count: int, whole_k: int) -> Tensor:
    dtype = parts_dtype(weight, count, whole_k)
    return x.new_empty((count, x.shape[0], weight.shape[0]), dtype=dtype)


def parts_dtype(weight: Tensor, count: int, whole_k: int) -> torch.dtype:
    """bfloat16 of a whole weight's sum, float32 of parts of it; a piece of the weight may give one."""
    is_sum = count == 1 and (whole_k or weight.shape[1]) == weight.shape[1]
    return torch.bfloat16 if is_sum else torch.float32


def sum_blocks(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
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


@operator(launches=LAUNCHES, check=_is_blocks)
def linear_w8a8(
    x: Rows, x_scale: RowFactors, weight: Weight, weight_scale: Factors
) -> Annotated[Tensor, "M N", torch.bfloat16]:
    """(x * x_scale) @ (weight * weight_scale).T, a product in FP8 for each 128 columns, added in float32.

    x [M, K] and x_scale [M, K / 128]: what `quantize_rows` gives, rows at any stride. weight: [N, K],
    weight_scale [ceil(N/128), K / 128], a factor for each block. Returns [M, N] bfloat16. The bits of a row
    depend on that row and on the weight alone.
    """
    return sum_blocks(x, x_scale, weight, weight_scale).bfloat16()


@operator(launches=LAUNCHES, check=_count_fits, fake=_parts)
def linear_w8a8_parts(
    x: Rows, x_scale: RowFactors, weight: Weight, weight_scale: Factors, count: int, whole_k: int = 0
) -> Annotated[Tensor, "count M N", (torch.float32, torch.bfloat16)]:
    """A product before a norm: `linear_w8a8` in P = count parts, which the norm adds up.

    Arguments as those of `linear_w8a8`; whole_k: K of the weight of which `weight` holds some neighbouring
    shares of the columns, 0 if it is whole. Returns [P, M, N] float32, with P = 1 and a whole weight the sum
    in bfloat16. K is cut into shares that are added as a tree (ops.shares): every P gives the same bits.
    """
    length = (whole_k or x.shape[1]) // share_count(whole_k or x.shape[1])
    shares = []
    for first in range(0, x.shape[1], length):
        columns = slice(first, first + length)
        blocks = slice(first // FP8_BLOCK, (first + length) // FP8_BLOCK)
        pieces = (x[:, columns], x_scale[:, blocks], weight[:, columns], weight_scale[:, blocks])
        shares.append(sum_blocks(*pieces))
    size = len(shares) // count
    parts = torch.stack([add_tree(shares[first : first + size]) for first in range(0, len(shares), size)])
    return parts.to(parts_dtype(weight, count, whole_k))
