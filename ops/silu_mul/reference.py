"""The specifications of `silu_mul` and `silu_mul_quantized`, which are also the CPU route."""

from __future__ import annotations

from typing import Annotated

from torch import Tensor

from compiled_mtp.ops.checks import fail
from compiled_mtp.ops.fp8 import FP8_BLOCK, quantize
from compiled_mtp.ops.numerics import silu
from compiled_mtp.ops.registry import Launch, operator
from compiled_mtp.ops.signature import ACTIVATION, F32, FP8, Like


def _is_even(columns: int) -> None:
    if columns % 2:
        raise fail("gate_up", "have an even number of columns", columns, "pass gate | up")


@operator(launches=(Launch("silu_mul_kernel"),), check=_is_even)
def silu_mul(
    gate_up: Annotated[Tensor, "M columns", ACTIVATION],
) -> Annotated[Tensor, "M columns//2", Like("gate_up")]:
    """silu(gate) * up in float32, rounded once.

    gate_up: [M, 2 I], the first I columns are the gate; any row stride. Returns [M, I].
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (silu(gate) * up).to(gate_up.dtype).contiguous()


def _is_groups(columns: int) -> None:
    if columns == 0 or columns % (2 * FP8_BLOCK):
        raise fail("gate_up", f"have a multiple of {2 * FP8_BLOCK} columns", columns, "use silu_mul")


@operator(launches=(Launch("silu_mul_quantized_kernel"),), check=_is_groups)
def silu_mul_quantized(
    gate_up: Annotated[Tensor, "M columns", ACTIVATION],
) -> tuple[Annotated[Tensor, "M columns//2", FP8], Annotated[Tensor, "M columns//256", F32]]:
    """Compute quantize_rows(silu_mul(gate_up)), with the same bits, in one launch.

    gate_up: [M, 2 I], I a multiple of 128; any row stride. Returns (values [M, I], factors [M, I / 128]).
    """
    return quantize(silu_mul.reference(gate_up))
