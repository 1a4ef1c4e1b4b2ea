"""Checks and registration of `linear`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from compiled_mtp.ops.checks import check_dtype, check_last_contiguous, check_shape, fail
from compiled_mtp.ops.fp8 import scale_shape
from compiled_mtp.ops.linear.reference import (
    linear_parts_reference,
    linear_reference,
    linear_silu_mul_reference,
)
from compiled_mtp.ops.registry import register
from compiled_mtp.ops.shares import part_counts, share_count


def _fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    out_float32: bool,
    prefill: bool,
    whole_shape: Sequence[int] | None = None,
) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=torch.float32 if out_float32 else x.dtype)


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    out_float32: bool,
    prefill: bool,
    whole_shape: Sequence[int] | None = None,
) -> torch.Tensor:
    # Imported on first use: without a GPU nothing needs Triton.
    from compiled_mtp.ops.linear.kernel import launch

    return launch(x, weight, weight_scale, out_float32, prefill, whole_shape)


def _check_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None = None,
    out_float32: bool = False,
    prefill: bool = False,
    whole_shape: Sequence[int] | None = None,
) -> None:
    check_dtype("x", x, (torch.float32, torch.bfloat16), "cast the activations")
    check_shape("x", x, (None, weight.shape[-1]), "pass rows as long as the weight's")
    check_last_contiguous("x", x)
    check_last_contiguous("weight", weight)
    if x.shape[1] == 0:
        raise fail("x", "have columns", list(x.shape), "pass rows as long as the weight's")
    if weight.dtype == torch.float8_e4m3fn:
        if weight_scale is None:
            raise fail(
                "weight_scale", "be given for an FP8 weight", None, "pass the checkpoint's block scales"
            )
        check_shape(
            "weight_scale",
            weight_scale,
            scale_shape(tuple(weight.shape)),
            "pass one scale per 128 x 128 block",
        )
        check_dtype("weight_scale", weight_scale, (torch.float32,), "cast the scales")
        check_last_contiguous("weight_scale", weight_scale)
    else:
        check_dtype("weight", weight, (x.dtype,), "use one dtype for activations and weights")
        if weight_scale is not None:
            raise fail("weight_scale", "be None unless the weight is FP8", weight.dtype, "drop it")
    if whole_shape is not None:
        whole = tuple(whole_shape)
        n, k = weight.shape
        fits = len(whole) == 2 and whole[0] % n == 0 and whole[1] % k == 0
        if not fits or (k < whole[1] and k * share_count(whole[1]) % whole[1]):
            raise fail(
                "whole_shape",
                f"be a multiple of the weight's {[n, k]} in whole shares of K",
                whole,
                "pass [N, K] of the weight that was cut, or None",
            )


_linear = register("linear", linear_reference, _fake, launch=_launch, check=_check_linear)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None = None,
    out_float32: bool = False,
    prefill: bool = False,
    whole_shape: Sequence[int] | None = None,
) -> torch.Tensor:
    """x @ weight.T, accumulated in float32 and rounded once.

    x: [M, K] float32 or bfloat16, rows at any stride. weight: [N, K] of the same dtype, or float8_e4m3fn with
    weight_scale [ceil(N/128), ceil(K/128)] float32, one factor per 128 x 128 block. Returns [M, N] of x's
    dtype, or float32 when `out_float32`. whole_shape: [N, K] of the weight of which `weight` holds some rows,
    None if it is whole: the parts of K, and so the bits, are the whole weight's.

    With prefill=False the bits of a row depend on that row and on the weight alone, for every M; with
    prefill=True they may depend on M too, which lets a GPU use its fastest product.

    Raises ValueError for shapes, dtypes or strides that do not fit.
    """
    return _linear(x, weight, weight_scale, out_float32, prefill, whole_shape)


def _fake_silu_mul(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    whole_shape: Sequence[int] | None = None,
) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[0] // 2))


def _launch_silu_mul(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    whole_shape: Sequence[int] | None = None,
) -> torch.Tensor:
    from compiled_mtp.ops.linear.kernel import launch_gated

    return launch_gated(x, weight, weight_scale, whole_shape)


def _check_silu_mul(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None = None,
    whole_shape: Sequence[int] | None = None,
) -> None:
    _check_linear(x, weight, weight_scale, whole_shape=whole_shape)
    if weight.shape[0] % 2:
        raise fail("weight", "have an even number of rows", weight.shape[0], "pass gate | up")


_linear_silu_mul = register(
    "linear_silu_mul",
    linear_silu_mul_reference,
    _fake_silu_mul,
    launch=_launch_silu_mul,
    check=_check_silu_mul,
)


def linear_silu_mul(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None = None,
    whole_shape: Sequence[int] | None = None,
) -> torch.Tensor:
    """silu(gate) * up with gate | up = linear(x, weight, weight_scale), to the bit, in one launch.

    Arguments as those of `linear`; weight [2 I, K] holds the gate's rows and then up's. Returns [M, I] of x's
    dtype. The bits of a row depend on that row and on the weight alone.
    """
    return _linear_silu_mul(x, weight, weight_scale, whole_shape)


def _fake_parts(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    count: int,
    whole_shape: Sequence[int] | None = None,
) -> torch.Tensor:
    dtype = x.dtype if count == 1 else torch.float32
    return x.new_empty((count, x.shape[0], weight.shape[0]), dtype=dtype)


def _launch_parts(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    count: int,
    whole_shape: Sequence[int] | None = None,
) -> torch.Tensor:
    from compiled_mtp.ops.linear.kernel import launch_parts

    return launch_parts(x, weight, weight_scale, count, whole_shape)


def _check_parts(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    count: int,
    whole_shape: Sequence[int] | None = None,
) -> None:
    _check_linear(x, weight, weight_scale, whole_shape=whole_shape)
    # On a CPU the product is one.
    k = weight.shape[1]
    counts = part_counts(k, whole_shape[1] if whole_shape else k) if weight.is_cuda else (1,)
    if count not in counts:
        remedy = "pass count_parts(weight, whole_shape)"
        raise fail("count", f"be one of {counts} for this weight and device", count, remedy)


_linear_parts = register(
    "linear_parts", linear_parts_reference, _fake_parts, launch=_launch_parts, check=_check_parts
)


def linear_parts(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    count: int,
    whole_shape: Sequence[int] | None = None,
) -> torch.Tensor:
    """A product before a norm: x @ weight.T in P parts, which the norm adds up.

    Arguments as those of `linear`; `weight` may also hold neighbouring shares of the whole weight's columns,
    and x those columns. count = P, by rule count_parts(weight, whole_shape): a number in the graph, or code
    that a compiler has cached would outlive the table that P comes from. Returns [P, M, N], the P parts of
    each sum in float32; with P = 1 the sum, rounded to x's dtype.

    K is cut into equal shares, each summed from zero in one order; a part is neighbouring shares added as a
    tree, ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)), and `add_rms_norm` goes on with that tree. So every P,
    and every number of pieces that a weight is cut into, gives the same bits.

    Raises ValueError for a count that no tree has, and for what `linear` refuses.
    """
    return _linear_parts(x, weight, weight_scale, count, whole_shape)
