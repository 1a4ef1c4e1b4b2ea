"""Cases of `silu_mul` and `silu_mul_quantized`."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from compiled_mtp.ops.fp8 import FP8_BLOCK
from compiled_mtp.ops.silu_mul import silu_mul, silu_mul_quantized
from op_cases import ModelShape, OpCase
from op_cases.quantize_rows import check_quantized


def check(args: tuple[torch.Tensor, ...]) -> None:
    gate, up = args[0].double().chunk(2, -1)
    wanted = gate * torch.sigmoid(gate) * up
    torch.testing.assert_close(silu_mul(*args).double(), wanted, rtol=4.1e-3, atol=1e-6)


def check_groups(args: tuple[torch.Tensor, ...]) -> None:
    check_quantized(*silu_mul_quantized(*args), silu_mul(*args))


def alternative(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def cases(shape: ModelShape, rows: int, settings: Mapping[str, int]) -> list[OpCase]:
    """Rounded, and quantised too; none for a model without a dense MLP."""
    width = shape.intermediate
    if not width:
        return []

    def make_inputs(device: str, seed: int) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator(device).manual_seed(seed)
        return (torch.randn(rows, 2 * width, dtype=torch.bfloat16, device=device, generator=generator),)

    quantised_bytes = rows * (4 * width + width + 4 * width // FP8_BLOCK)
    return [
        OpCase(f"{width}", make_inputs, silu_mul, 2 * 3 * rows * width, check, alternative, "two kernels"),
        OpCase(f"{width} quantised", make_inputs, silu_mul_quantized, quantised_bytes, check_groups),
    ]
