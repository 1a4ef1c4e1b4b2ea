"""The specification of `silu_mul`, and what runs on the CPU."""

from __future__ import annotations

from typing import Annotated

from torch import Tensor

from compiled_mtp.ops.checks import fail
from compiled_mtp.ops.numerics import silu
from compiled_mtp.ops.registry import Launch, operator
from compiled_mtp.ops.signature import ACTIVATION, Like


def _is_even(columns: int) -> None:
    if columns % 2:
        raise fail("gate_up", "have an even number of columns", columns, "pass gate | up")


@operator(launches=(Launch("silu_mul_kernel"),), check=_is_even)
def silu_mul(
    gate_up: Annotated[Tensor, "M columns", ACTIVATION],
) -> Annotated[Tensor, "M columns//2", Like("gate_up")]:
    """silu(gate) * up in float32, rounded once.

    gate_up: [M, 2 I], the first I columns are the gate; rows at any stride. Returns [M, I].
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (silu(gate) * up).to(gate_up.dtype).contiguous()
