"""Checks and registration of `quantize_rows`."""

from __future__ import annotations

import torch

from compiled_mtp.ops.checks import check_dtype, check_last_contiguous, check_shape, fail
from compiled_mtp.ops.fp8 import FP8_BLOCK
from compiled_mtp.ops.quantize_rows.reference import quantize_rows_reference
from compiled_mtp.ops.registry import register


def _fake(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = x.shape
    scale = x.new_empty((rows, columns // FP8_BLOCK), dtype=torch.float32)
    return x.new_empty((rows, columns), dtype=torch.float8_e4m3fn), scale


def _launch(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # Imported on first use: without a GPU nothing needs Triton.
    from compiled_mtp.ops.quantize_rows.kernel import launch

    return launch(x)


def _check(x: torch.Tensor) -> None:
    check_shape("x", x, (None, None), "pass rows")
    check_dtype("x", x, (torch.bfloat16,), "round the activations first")
    check_last_contiguous("x", x)
    if x.shape[1] == 0 or x.shape[1] % FP8_BLOCK:
        raise fail("x", f"have a multiple of {FP8_BLOCK} columns", x.shape[1], "keep this weight in bfloat16")


_quantize_rows = register("quantize_rows", quantize_rows_reference, _fake, launch=_launch, check=_check)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in e4m3, with one factor for each group of 128 columns.

    x: [M, K] bfloat16, rows at any stride, K a multiple of 128. Returns (values [M, K] float8_e4m3fn, factors
    [M, K / 128] float32): a factor is the group's largest magnitude over 448, and values * factors is x to
    within half a step of e4m3. The bits of a row depend on that row alone.

    Raises ValueError for shapes, dtypes or strides that do not fit.
    """
    return _quantize_rows(x)
