"""The specifications of `linear`, `linear_silu_mul` and `linear_parts`."""

from __future__ import annotations

from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_mtp.ops.checks import fail, wrong_dtype
from compiled_mtp.ops.fp8 import FP8_BLOCK, dequantize
from compiled_mtp.ops.linear.config import count_parts
from compiled_mtp.ops.numerics import silu
from compiled_mtp.ops.registry import Launch, operator
from compiled_mtp.ops.signature import ACTIVATION, F32, FP8, Like, Remedy

Rows = Annotated[Tensor, "M K", ACTIVATION, Remedy("pass rows as long as the weight's")]
Weight = Annotated[Tensor, "N K", (*ACTIVATION, FP8), Remedy("pass rows as long as the weight's")]
Scale = Annotated[Tensor, "(N+127)//128 (K+127)//128", F32, Remedy("pass one scale per 128 x 128 block")]
# The weight is written by no kernel. A fence, since it lets the next kernel come only once it has waited:
# measured, two kernels that wait crowd a third.
LAUNCHES = (Launch("linear_kernel", reads_early=("weight",), is_fence=True),)


def _weight_fits(x: Tensor, weight: Tensor, weight_scale: Tensor | None, K: int) -> None:
    if K == 0:
        raise fail("x", "have columns", list(x.shape), "pass rows as long as the weight's")
    if weight.dtype == FP8:
        if weight_scale is None:
            raise fail(
                "weight_scale", "be given for an FP8 weight", None, "pass the checkpoint's block scales"
            )
    elif weight.dtype != x.dtype:
        raise wrong_dtype("weight", weight, (x.dtype, FP8))
    elif weight_scale is not None:
        raise fail("weight_scale", "be None unless the weight is FP8", weight.dtype, "drop it")


def _product(x: Tensor, weight: Tensor, out_float32: bool) -> Tensor:
    dtype = torch.float32 if out_float32 else x.dtype
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=dtype)


@operator(launches=LAUNCHES, check=_weight_fits, fake=_product, has_cpu_route=True)
def linear(
    x: Rows,
    weight: Weight,
    weight_scale: Scale | None = None,
    out_float32: bool = False,
    prefill: bool = False,
) -> Annotated[Tensor, "M N", ACTIVATION]:
    """x @ weight.T, accumulated in float32 and rounded once.

    x: [M, K] float32 or bfloat16, rows at any stride. weight: [N, K] of the same dtype, or float8_e4m3fn with
    weight_scale [ceil(N/128), ceil(K/128)] float32, one factor per 128 x 128 block. Returns [M, N] of x's
    dtype, or float32 when `out_float32`.

    The bits of a row depend on that row, the weight and `prefill` alone, for every M. prefill: the rows are a
    prompt's, many at a time, for which a GPU has another order of the columns that is faster.
    """
    values = weight.float() if weight_scale is None else dequantize(weight, weight_scale)
    return F.linear(x.float(), values).to(torch.float32 if out_float32 else x.dtype)


def _is_gate_and_up(x: Tensor, weight: Tensor, weight_scale: Tensor | None, N: int, K: int) -> None:
    _weight_fits(x, weight, weight_scale, K)
    if N % 2:
        raise fail("weight", "have an even number of rows", N, "pass gate | up")


@operator(launches=LAUNCHES, check=_is_gate_and_up, has_cpu_route=True)
def linear_silu_mul(
    x: Rows, weight: Weight, weight_scale: Scale | None = None
) -> Annotated[Tensor, "M N//2", Like("x")]:
    """silu(gate) * up with gate | up = linear(x, weight, weight_scale), to the bit, in one launch.

    Arguments as those of `linear`; weight [2 I, K] holds the gate's rows and then up's. Returns [M, I] of x's
    dtype. The bits of a row depend on that row and on the weight alone.
    """
    gate, up = linear.reference(x, weight, weight_scale).float().chunk(2, dim=-1)
    return (silu(gate) * up).to(x.dtype)


def _count_fits(x: Tensor, weight: Tensor, weight_scale: Tensor | None, count: int, K: int) -> None:
    _weight_fits(x, weight, weight_scale, K)
    if count != count_parts(weight, x.dtype):
        remedy = f"pass count_parts(weight, {x.dtype})"
        raise fail("count", f"be {count_parts(weight, x.dtype)} for this weight and device", count, remedy)


def _parts(x: Tensor, weight: Tensor, count: int) -> Tensor:
    dtype = x.dtype if count == 1 else torch.float32
    return x.new_empty((count, x.shape[0], weight.shape[0]), dtype=dtype)


@operator(launches=LAUNCHES, check=_count_fits, fake=_parts, has_cpu_route=True)
def linear_parts(
    x: Rows, weight: Weight, weight_scale: Scale | None, count: int
) -> Annotated[Tensor, "count M N", ACTIVATION]:
    """`linear` for the norm that follows, which adds up what other programs would have to wait for.

    Arguments as those of `linear`, and count = P = count_parts(weight, x.dtype): a number in the graph, or
    code that a compiler has cached would outlive the table that P comes from. Returns [P, M, N], the P parts
    of each sum in float32; with P = 1 the sum, rounded to x's dtype. Added up in their order and rounded
    once, as `add_rms_norm` does, the parts are `linear`'s result to the bit.
    """
    if count == 1:
        return linear.reference(x, weight, weight_scale)[None]
    # Of any length: what the parts are is the kernel's choice, their sum is not.
    length = -(-x.shape[1] // (count * FP8_BLOCK)) * FP8_BLOCK
    parts = []
    for first in range(0, count * length, length):
        columns = slice(first, first + length)
        blocks = slice(first // FP8_BLOCK, (first + length) // FP8_BLOCK)
        scale = None if weight_scale is None else weight_scale[:, blocks]
        parts.append(linear.reference(x[:, columns], weight[:, columns], scale, out_float32=True))
    return torch.stack(parts)
