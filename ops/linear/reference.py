"""The specifications of `linear`, `linear_side`, `linear_silu_mul` and `linear_partials`."""

from __future__ import annotations

from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_mtp.ops.checks import fail, is_known, wrong_dtype
from compiled_mtp.ops.fp8 import FP8_BLOCK, dequantize
from compiled_mtp.ops.k_splits import (
    add_splits,
    count_cpu_k_splits,
    count_k_splits,
    is_sum,
    new_partials,
    part_counts,
)
from compiled_mtp.ops.linear.config import whole_size
from compiled_mtp.ops.numerics import silu
from compiled_mtp.ops.registry import Launch, operator
from compiled_mtp.ops.signature import ACTIVATION, F32, FP8, Like, Remedy

Rows = Annotated[Tensor, "M K", ACTIVATION, Remedy("pass rows as long as the weight's")]
Weight = Annotated[Tensor, "N K", (*ACTIVATION, FP8), Remedy("pass rows as long as the weight's")]
Scale = Annotated[Tensor, "(N+127)//128 (K+127)//128", F32, Remedy("pass one scale per 128 x 128 block")]
# No kernel writes the weight. The kernels are fences, because they let the next kernel start only after their
# wait: measured, two waiting kernels of this size slow down a third.
LAUNCHES = tuple(
    Launch(kernel, reads_early=("weight",), is_fence=True)
    for kernel in ("linear_kernel", "large_m_kernel", "persistent_kernel")
)
# No fence: the next kernel loads its weights while this one waits, and shared memory has room for both.
RESIDENT_LAUNCHES = (Launch("resident_kernel", reads_early=("weight",)),)


def _weight_fits(
    x: Tensor, weight: Tensor, weight_scale: Tensor | None, whole_n: int, whole_k: int, N: int, K: int
) -> None:
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
    n, k = whole_size(weight, whole_n, whole_k)
    k_splits = (count_k_splits if weight.is_cuda else count_cpu_k_splits)(k)
    if (N and n % N) or k % K or (k > K and K * k_splits % k):
        rule = f"be multiples of the weight's {[N, K]} in whole K splits"
        raise fail("whole_n and whole_k", rule, [n, k], "pass the sizes of the weight that was cut, or 0")


def _product(x: Tensor, weight: Tensor, out_float32: bool) -> Tensor:
    dtype = torch.float32 if out_float32 else x.dtype
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=dtype)


@operator(
    launches=LAUNCHES,
    resident_launches=RESIDENT_LAUNCHES,
    check=_weight_fits,
    fake=_product,
    has_cpu_route=True,
)
def linear(
    x: Rows,
    weight: Weight,
    weight_scale: Scale | None = None,
    out_float32: bool = False,
    prefill: bool = False,
    whole_n: int = 0,
    whole_k: int = 0,
    resident: bool = False,
) -> Annotated[Tensor, "M N", ACTIVATION]:
    """x @ weight.T, accumulated in float32 and rounded once.

    x: [M, K] float32 or bfloat16, any row stride. weight: [N, K] of the same dtype, or float8_e4m3fn with
    weight_scale [ceil(N/128), ceil(K/128)] float32, one factor per 128 x 128 block. Returns [M, N] of x's
    dtype, or float32 if `out_float32`. whole_n, whole_k: N and K of the whole weight if `weight` is a shard
    of its rows, else 0: the K splits, and so the bits, are the whole weight's.

    For every M, the bits of a row depend on that row, the weight and `prefill` alone. prefill: the rows are a
    prompt's; a GPU adds their columns in another order, which is faster for many rows. resident: with few
    rows, and a weight that `can_be_resident`, the kernel loads the weight into shared memory before the
    previous kernel ends, and lets the next kernel do the same. It is then no fence (`Launch`): whatever the
    next kernel reads early must be older.
    """
    values = weight.float() if weight_scale is None else dequantize(weight, weight_scale)
    return F.linear(x.float(), values).to(torch.float32 if out_float32 else x.dtype)


def _is_plain(x: Tensor, weight: Tensor, N: int, K: int) -> None:
    _weight_fits(x, weight, None, 0, 0, N, K)


# x is older than the last fence, which is the product that runs at the same time.
@operator(launches=(Launch("side_kernel", reads_early=("x", "weight")),), check=_is_plain, has_cpu_route=True)
def linear_side(
    x: Rows, weight: Annotated[Tensor, "N K", Like("x"), Remedy("pass rows as long as x's")]
) -> Annotated[Tensor, "M N", Like("x")]:
    """x @ weight.T of few weight rows, launched directly after another product of x, to run during it.

    x: [M, K] float32 or bfloat16, any row stride. It must be older than the operator directly before this
    call, and that operator must be a fence (`Launch`), as every product without resident weights is. weight:
    [N, K] of the same dtype. Returns [M, N] of that dtype, accumulated in float32 and rounded once. For every
    M and every shard of the weight's rows, the bits of a row depend on that row and the weight alone; on a
    GPU they are not those of `linear`.
    """
    return linear.reference(x, weight)


def _is_gate_and_up(
    x: Tensor, weight: Tensor, weight_scale: Tensor | None, whole_n: int, whole_k: int, N: int, K: int
) -> None:
    _weight_fits(x, weight, weight_scale, whole_n, whole_k, N, K)
    if N % 2:
        raise fail("weight", "have an even number of rows", N, "pass gate | up")


@operator(launches=LAUNCHES, resident_launches=RESIDENT_LAUNCHES, check=_is_gate_and_up, has_cpu_route=True)
def linear_silu_mul(
    x: Rows,
    weight: Weight,
    weight_scale: Scale | None = None,
    whole_n: int = 0,
    whole_k: int = 0,
    resident: bool = False,
) -> Annotated[Tensor, "M N//2", Like("x")]:
    """silu(gate) * up with gate | up = linear(x, weight, weight_scale), with the same bits, in one launch.

    Takes the arguments of `linear`; weight [2 I, K] holds the rows of gate, then those of up. Returns [M, I]
    of x's dtype. The bits of a row depend on that row and on the weight alone.
    """
    gate, up = linear.reference(x, weight, weight_scale).float().chunk(2, dim=-1)
    return (silu(gate) * up).to(x.dtype)


def _count_fits(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor | None,
    count: int,
    whole_n: int,
    whole_k: int,
    prefill: bool,
    N: int,
    K: int,
) -> None:
    _weight_fits(x, weight, weight_scale, whole_n, whole_k, N, K)
    if prefill and weight.is_cuda and whole_k > K:
        rule = "be False for a shard of a weight's columns on a GPU"
        raise fail(
            "prefill", rule, prefill, "its order for prompts has no K splits there: pass the whole weight"
        )
    # On a CPU the product adds its K splits itself.
    counts = part_counts(K, whole_k or K) if weight.is_cuda else (1,)
    if is_known(count) and count not in counts:
        remedy = "pass count_partials(weight, rows, whole_n, whole_k)"
        raise fail("count", f"be one of {counts} for this weight and device", count, remedy)


def _parts(x: Tensor, weight: Tensor, count: int, whole_k: int, stacked: bool) -> Tensor:
    # The compiler knows the count of stacked partials only as an expression of rows: no branch may read it.
    is_rounded = not stacked and is_sum(weight.shape[1], count, whole_k)
    return new_partials(x, weight, count, stacked, x.dtype if is_rounded else torch.float32)


@operator(
    launches=LAUNCHES, resident_launches=RESIDENT_LAUNCHES, check=_count_fits, fake=_parts, has_cpu_route=True
)
def linear_partials(
    x: Rows,
    weight: Weight,
    weight_scale: Scale | None,
    count: int,
    whole_n: int = 0,
    whole_k: int = 0,
    prefill: bool = False,
    stacked: bool = False,
    resident: bool = False,
) -> Annotated[Tensor, "... N", ACTIVATION]:
    """A product before a norm: x @ weight.T in P split-K partials, which the norm adds.

    Takes the arguments of `linear`; `weight` may also be a shard of neighbouring K splits of the whole
    weight's columns, and x those columns. count: P, from count_partials(weight, rows, whole_n, whole_k).
    It is an argument, and so part of a compiled graph: cached code would otherwise outlive the table that
    decides P. In a program for several numbers of rows it may be an expression of them.

    Returns [P, M, N], the P partials of each sum in float32; with P = 1 and a whole weight, the sum rounded
    to x's dtype. stacked: return [P * M, N], always float32: then neither shape nor dtype depends on whether
    P is 1, which a program for several numbers of rows cannot know. prefill: the rows are a prompt's, and P
    is 1; a GPU adds their columns in the order of `linear` with `prefill`.

    K is cut into equal K splits, each summed from zero in one order. A partial adds neighbouring splits as a
    tree, ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)), and `add_rms_norm` continues that tree. Every P and every
    number of shards therefore give the same bits. A CPU has its own K splits.
    """
    if is_sum(weight.shape[1], count, whole_k):
        whole = linear.reference(x, weight, weight_scale, stacked)
        return whole if stacked else whole[None]
    k = whole_k or x.shape[1]
    length = k // count_k_splits(k)
    k_splits = []
    for first in range(0, x.shape[1], length):
        columns = slice(first, first + length)
        blocks = slice(first // FP8_BLOCK, (first + length) // FP8_BLOCK)
        scale = None if weight_scale is None else weight_scale[:, blocks]
        k_splits.append(linear.reference(x[:, columns], weight[:, columns], scale, out_float32=True))
    return add_splits(k_splits, count, stacked)
