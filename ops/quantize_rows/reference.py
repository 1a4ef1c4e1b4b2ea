"""The specification of `quantize_rows`, which is also the CPU route."""

from __future__ import annotations

from typing import Annotated

from torch import Tensor

from compiled_mtp.ops.checks import fail
from compiled_mtp.ops.fp8 import FP8_BLOCK, quantize
from compiled_mtp.ops.registry import Launch, operator
from compiled_mtp.ops.signature import ACTIVATION, F32, FP8, Remedy


def _is_groups(K: int) -> None:
    if K == 0 or K % FP8_BLOCK:
        raise fail("x", f"have a multiple of {FP8_BLOCK} columns", K, "keep this weight in bfloat16")


@operator(launches=(Launch("quantize_rows_kernel"),), check=_is_groups)
def quantize_rows(
    x: Annotated[Tensor, "M K", ACTIVATION, Remedy("pass activations")],
) -> tuple[Annotated[Tensor, "M K", FP8], Annotated[Tensor, "M K//128", F32]]:
    """Quantize rows to e4m3, with one factor for each group of 128 columns.

    x: [M, K] float32 or bfloat16, any row stride, K a multiple of 128. Returns (values [M, K], factors
    [M, K / 128]): a factor is the group's largest magnitude over 448, and values * factors is x to within
    half a step of e4m3.
    The bits of a row depend on that row alone.
    """
    return quantize(x)
