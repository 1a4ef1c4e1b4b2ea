"""The specifications of `linear_w8a8` and `linear_w8a8_partials`, and what runs on the CPU."""

from __future__ import annotations

from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_mtp.ops.checks import fail, is_known
from compiled_mtp.ops.fp8 import FP8_BLOCK
from compiled_mtp.ops.k_splits import add_splits, count_k_splits, new_partials, part_counts
from compiled_mtp.ops.linear_w8a8.config import parts_dtype
from compiled_mtp.ops.registry import Launch, operator
from compiled_mtp.ops.signature import ACTIVATION, F32, FP8, Remedy

Rows = Annotated[Tensor, "M K", FP8, Remedy("pass what quantize_rows gives")]
RowFactors = Annotated[Tensor, "M K//128", F32, Remedy("pass quantize_rows' factors")]
Weight = Annotated[Tensor, "N K", (FP8, *ACTIVATION), Remedy("use linear")]
Factors = Annotated[Tensor, "(N+127)//128 K//128", F32, Remedy("pass one factor per 128 x 128 block")]
# Fences, as linear's kernels are.
LAUNCHES = tuple(
    Launch(kernel, reads_early=("weight",), is_fence=True)
    for kernel in ("linear_w8a8_kernel", "large_m_w8a8_kernel", "persistent_kernel")
)


def _weight_fits(weight: Tensor, weight_scale: Tensor | None, K: int) -> None:
    if K == 0 or K % FP8_BLOCK:
        raise fail("x", f"have a multiple of {FP8_BLOCK} columns", K, "use linear")
    if weight.dtype == FP8:
        if weight_scale is None:
            rule, remedy = "be given for an FP8 weight", "pass the checkpoint's block scales"
            raise fail("weight_scale", rule, None, remedy)
    elif weight_scale is not None:
        raise fail("weight_scale", "be None unless the weight is FP8", weight.dtype, "drop it")
    elif weight.is_cuda:
        raise fail("weight", "have dtype float8_e4m3fn on a GPU", weight.dtype, "keep it in FP8")


def _count_fits(weight: Tensor, weight_scale: Tensor | None, count: int, whole_k: int, K: int) -> None:
    _weight_fits(weight, weight_scale, K)
    counts = part_counts(K, whole_k or K)
    if is_known(count) and count not in counts:
        raise fail("count", f"be one of {counts} for this weight", count, "pass how many programs may sum it")


def _product(x: Tensor, weight: Tensor, out_float32: bool) -> Tensor:
    dtype = torch.float32 if out_float32 else torch.bfloat16
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=dtype)


def _parts(x: Tensor, weight: Tensor, count: int, whole_k: int, out_float32: bool, stacked: bool) -> Tensor:
    # The compiler knows the count of stacked partials only as an expression of rows: no branch may read it.
    dtype = parts_dtype(weight, count, whole_k, out_float32 or stacked)
    return new_partials(x, weight, count, stacked, dtype)


def sum_blocks(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor | None) -> Tensor:
    """[M, N] in float32: a product for each 128 columns, times both factors, added in order."""
    values, x_values = weight.float(), x.float()
    total = x_values.new_zeros((x.shape[0], weight.shape[0]))
    for block in range(x.shape[1] // FP8_BLOCK):
        columns = slice(block * FP8_BLOCK, (block + 1) * FP8_BLOCK)
        factor = x_scale[:, block, None]
        if weight_scale is not None:
            rows = weight_scale[:, block].repeat_interleave(FP8_BLOCK)[: weight.shape[0]]
            factor = factor * rows[None]
        total = total + F.linear(x_values[:, columns], values[:, columns]) * factor
    return total


@operator(launches=LAUNCHES, check=_weight_fits, fake=_product, has_cpu_route=True)
def linear_w8a8(
    x: Rows, x_scale: RowFactors, weight: Weight, weight_scale: Factors | None, out_float32: bool = False
) -> Annotated[Tensor, "M N", (torch.bfloat16, torch.float32)]:
    """(x * x_scale) @ (weight * weight_scale).T, a product in FP8 for each 128 columns, added in float32.

    x [M, K] and x_scale [M, K / 128]: what `quantize_rows` gives, rows at any stride. weight: [N, K] in
    float8_e4m3fn, weight_scale [ceil(N/128), K / 128], a factor for each block; on a CPU also a weight that
    was multiplied out, without factors. Returns [M, N] bfloat16, or float32 when `out_float32`. The bits of a
    row depend on that row and on the weight alone.
    """
    y = sum_blocks(x, x_scale, weight, weight_scale)
    return y if out_float32 else y.bfloat16()


@operator(launches=LAUNCHES, check=_count_fits, fake=_parts, has_cpu_route=True)
def linear_w8a8_partials(
    x: Rows,
    x_scale: RowFactors,
    weight: Weight,
    weight_scale: Factors | None,
    count: int,
    whole_k: int = 0,
    out_float32: bool = False,
    stacked: bool = False,
) -> Annotated[Tensor, "... N", (torch.float32, torch.bfloat16)]:
    """A product before a norm: `linear_w8a8` in P = count parts, which the norm adds up.

    Arguments as those of `linear_w8a8`; whole_k: K of the weight of which `weight` holds neighbouring K
    splits, 0 if it is whole. Returns [P, M, N] float32; with P = 1 and a whole weight the sum, in bfloat16
    unless `out_float32`. stacked: as `linear_partials` has it. The K splits are added as a tree
    (ops.k_splits): every P gives the same bits.
    """
    length = (whole_k or x.shape[1]) // count_k_splits(whole_k or x.shape[1])
    k_splits = []
    for first in range(0, x.shape[1], length):
        columns = slice(first, first + length)
        blocks = slice(first // FP8_BLOCK, (first + length) // FP8_BLOCK)
        scale = None if weight_scale is None else weight_scale[:, blocks]
        k_splits.append(sum_blocks(x[:, columns], x_scale[:, blocks], weight[:, columns], scale))
    partials = add_splits(k_splits, count, stacked)
    return partials if stacked else partials.to(parts_dtype(weight, count, whole_k, out_float32))
