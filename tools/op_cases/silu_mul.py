"""Cases of `silu_mul`."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from compiled_mtp.ops.silu_mul import silu_mul
from op_cases import ModelShape, OpCase


def check(args: tuple[torch.Tensor, ...]) -> None:
    gate, up = args[0].double().chunk(2, -1)
    wanted = gate * torch.sigmoid(gate) * up
    torch.testing.assert_close(silu_mul(*args).double(), wanted, rtol=4.1e-3, atol=1e-6)


def alternative(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def cases(shape: ModelShape, rows: int, settings: Mapping[str, int]) -> list[OpCase]:
    """One case; none for a model without a dense MLP."""
    width = shape.intermediate
    if not width:
        return []

    def make_inputs(device: str, seed: int) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator(device).manual_seed(seed)
        return (torch.randn(rows, 2 * width, dtype=torch.bfloat16, device=device, generator=generator),)

    return [
        OpCase(f"{width}", make_inputs, silu_mul, 2 * 3 * rows * width, check, alternative, "two kernels")
    ]
