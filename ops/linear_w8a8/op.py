"""Checks and registration of `linear_w8a8` and `linear_w8a8_parts`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from compiled_mtp.ops.checks import check_dtype, check_last_contiguous, check_shape, fail
from compiled_mtp.ops.fp8 import FP8_BLOCK, scale_shape
from compiled_mtp.ops.linear_w8a8.reference import linear_w8a8_parts_reference, linear_w8a8_reference
from compiled_mtp.ops.registry import register
from compiled_mtp.ops.shares import part_counts


def _fake(
    x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor
) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=torch.bfloat16)


def _launch(
    x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor
) -> torch.Tensor:
    # Imported on first use: without a GPU nothing needs Triton.
    from compiled_mtp.ops.linear_w8a8.kernel import launch

    return launch(x, x_scale, weight, weight_scale)


def _check(x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor) -> None:
    for name, tensor in (("x", x), ("weight", weight)):
        check_dtype(name, tensor, (torch.float8_e4m3fn,), "quantise it")
        check_last_contiguous(name, tensor)
    for name, tensor in (("x_scale", x_scale), ("weight_scale", weight_scale)):
        check_dtype(name, tensor, (torch.float32,), "cast the factors")
        check_last_contiguous(name, tensor)
    check_shape("x", x, (None, weight.shape[-1]), "pass rows as long as the weight's")
    if x.shape[1] == 0 or x.shape[1] % FP8_BLOCK:
        raise fail("x", f"have a multiple of {FP8_BLOCK} columns", x.shape[1], "use linear")
    check_shape("x_scale", x_scale, (x.shape[0], x.shape[1] // FP8_BLOCK), "pass quantize_rows' factors")
    shape = scale_shape(tuple(weight.shape))
    check_shape("weight_scale", weight_scale, shape, "pass one factor per 128 x 128 block")


_linear_w8a8 = register("linear_w8a8", linear_w8a8_reference, _fake, launch=_launch, check=_check)


def linear_w8a8(
    x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor
) -> torch.Tensor:
    """(x * x_scale) @ (weight * weight_scale).T, a product in FP8 for each 128 columns, added in float32.

    x [M, K] float8_e4m3fn and x_scale [M, K / 128] float32: what `quantize_rows` gives, rows at any stride.
    weight: [N, K] float8_e4m3fn, weight_scale [ceil(N/128), K / 128] float32, a factor for each block.
    Returns [M, N] bfloat16. The bits of a row depend on that row and on the weight alone.

    Raises ValueError for shapes, dtypes or strides that do not fit.
    """
    return _linear_w8a8(x, x_scale, weight, weight_scale)


def _fake_parts(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    count: int,
    whole_shape: Sequence[int] | None = None,
) -> torch.Tensor:
    dtype = torch.bfloat16 if count == 1 else torch.float32
    return x.new_empty((count, x.shape[0], weight.shape[0]), dtype=dtype)


def _launch_parts(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    count: int,
    whole_shape: Sequence[int] | None = None,
) -> torch.Tensor:
    from compiled_mtp.ops.linear_w8a8.kernel import launch_parts

    return launch_parts(x, x_scale, weight, weight_scale, count, whole_shape)


def _check_parts(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    count: int,
    whole_shape: Sequence[int] | None = None,
) -> None:
    _check(x, x_scale, weight, weight_scale)
    whole_k = whole_shape[1] if whole_shape else x.shape[1]
    counts = part_counts(x.shape[1], whole_k)
    if count not in counts:
        raise fail("count", f"be one of {counts} for this weight", count, "pass how many programs may sum it")


_linear_w8a8_parts = register(
    "linear_w8a8_parts",
    linear_w8a8_parts_reference,
    _fake_parts,
    launch=_launch_parts,
    check=_check_parts,
)


def linear_w8a8_parts(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    count: int,
    whole_shape: Sequence[int] | None = None,
) -> torch.Tensor:
    """A product before a norm: `linear_w8a8` in P = count parts, which the norm adds up.

    Arguments as those of `linear_w8a8`; whole_shape: [N, K] of the weight of which `weight` holds some
    neighbouring shares of the columns, None if it is whole. Returns [P, M, N] float32, with P = 1 the sum in
    bfloat16. K is cut into shares that are added as a tree (ops.shares): every P gives the same bits.

    Raises ValueError for a count that no tree has, and for what `linear_w8a8` refuses.
    """
    return _linear_w8a8_parts(x, x_scale, weight, weight_scale, count, whole_shape)
