"""The specifications of `linear`, `linear_side`, `linear_silu_mul` and `linear_partials`."""

from __future__ import annotations

from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_mtp.ops.checks import fail, is_known, wrong_dtype
from compiled_mtp.ops.fp8 import FP8_BLOCK, dequantize
from compiled_mtp.ops.k_splits import add_tree, count_cpu_k_splits, count_k_splits, part_counts
from compiled_mtp.ops.linear.config import is_sum, whole_size
from compiled_mtp.ops.numerics import silu
from compiled_mtp.ops.registry import Launch, operator
from compiled_mtp.ops.signature import ACTIVATION, F32, FP8, Like, Remedy

Rows = Annotated[Tensor, "M K", ACTIVATION, Remedy("pass rows as long as the weight's")]
Weight = Annotated[Tensor, "N K", (*ACTIVATION, FP8), Remedy("pass rows as long as the weight's")]
Scale = Annotated[Tensor, "(N+127)//128 (K+127)//128", F32, Remedy("pass one scale per 128 x 128 block")]
# The weight is written by no kernel. Fences, since they let the next kernel come only once they have waited:
# measured, two such kernels that wait crowd a third, where they take what room there is.
LAUNCHES = tuple(
    Launch(kernel, reads_early=("weight",), is_fence=True) for kernel in ("linear_kernel", "large_m_kernel")
)
# No fence: the next kernel's weights come while this one waits, and there is room for them.
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
        rule = f"be multiples of the weight's {[N, K]} in whole shares of K"
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

    x: [M, K] float32 or bfloat16, rows at any stride. weight: [N, K] of the same dtype, or float8_e4m3fn with
    weight_scale [ceil(N/128), ceil(K/128)] float32, one factor per 128 x 128 block. Returns [M, N] of x's
    dtype, or float32 when `out_float32`. whole_n, whole_k: N and K of the weight of which `weight` holds some
    rows, 0 if it is whole: the parts of K, and so the bits, are the whole weight's.

    The bits of a row depend on that row, the weight and `prefill` alone, for every M. prefill: the rows are a
    prompt's, many at a time, for which a GPU has another order of the columns that is faster. resident: with
    few rows, and where the weight `can_be_resident`, the kernel loads the weight into shared memory before
    the previous kernel has ended and lets the next one do the same; it is no fence then (`Launch`), and what
    the next one reads early must be older.
    """
    values = weight.float() if weight_scale is None else dequantize(weight, weight_scale)
    return F.linear(x.float(), values).to(torch.float32 if out_float32 else x.dtype)


def _is_plain(x: Tensor, weight: Tensor, N: int, K: int) -> None:
    _weight_fits(x, weight, None, 0, 0, N, K)


# x is older than the last fence, the product that this one runs beside.
@operator(launches=(Launch("side_kernel", reads_early=("x", "weight")),), check=_is_plain, has_cpu_route=True)
def linear_side(
    x: Rows, weight: Annotated[Tensor, "N K", Like("x"), Remedy("pass rows as long as x's")]
) -> Annotated[Tensor, "M N", Like("x")]:
    """x @ weight.T of few weight rows, launched right behind another product of x, beside which it runs.

    x: [M, K] float32 or bfloat16, rows at any stride; made before the operator before this one, which must be
    a fence (`Launch`), as every product is whose weight is not resident. weight: [N, K] of the same dtype.
    Returns [M, N] of
    it, accumulated in float32 and rounded once. The bits of a row depend on that row and on the weight alone,
    for every M and for every piece of the weight's rows; on a GPU they are not those of `linear`.
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
    """silu(gate) * up with gate | up = linear(x, weight, weight_scale), to the bit, in one launch.

    Arguments as those of `linear`; weight [2 I, K] holds the gate's rows and then up's. Returns [M, I] of x's
    dtype. The bits of a row depend on that row and on the weight alone.
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
        rule = "be False for a piece of a weight's columns on a GPU"
        raise fail(
            "prefill", rule, prefill, "its order for prompts has no shares there: pass the whole weight"
        )
    # On a CPU whoever asks adds the shares up.
    counts = part_counts(K, whole_k or K) if weight.is_cuda else (1,)
    if is_known(count) and count not in counts:
        remedy = "pass count_partials(weight, rows, whole_n, whole_k)"
        raise fail("count", f"be one of {counts} for this weight and device", count, remedy)


def _parts(x: Tensor, weight: Tensor, count: int, whole_k: int, stacked: bool) -> Tensor:
    if stacked:
        return x.new_empty((count * x.shape[0], weight.shape[0]), dtype=torch.float32)
    dtype = x.dtype if is_sum(weight, count, whole_k) else torch.float32
    return x.new_empty((count, x.shape[0], weight.shape[0]), dtype=dtype)


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
    """A product before a norm: x @ weight.T in P parts, which the norm adds up.

    Arguments as those of `linear`; `weight` may also hold neighbouring shares of the whole weight's columns,
    and x those columns. count = P, by rule count_partials(weight, rows, whole_n, whole_k): a number in the
    graph, or code that a compiler has cached would outlive the table that P comes from; where programs are
    for several numbers of rows it may be an expression of them. Returns [P, M, N], the P parts of each sum in
    float32; with P = 1 and a whole weight the sum, rounded to x's dtype. stacked: [P * M, N] instead, always
    float32, so that neither a dimension nor a dtype asks if P is 1, which a program for several numbers of
    rows cannot know. prefill: the rows are a prompt's, P is 1; a GPU has another order of the columns for
    them, that of `linear`.

    K is cut into equal shares, each summed from zero in one order; a part is neighbouring shares added as a
    tree, ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)), and `add_rms_norm` goes on with that tree. So every P,
    and every number of pieces that a weight is cut into, gives the same bits. A CPU has its own shares.
    """
    if is_sum(weight, count, whole_k):
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
    size = len(k_splits) // count
    partials = [add_tree(k_splits[first : first + size]) for first in range(0, len(k_splits), size)]
    return torch.cat(partials) if stacked else torch.stack(partials)
