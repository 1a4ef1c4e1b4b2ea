"""Cases of `silu_mul` and `silu_mul_quantized`."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

import torch

from compiled_mtp.ops.fp8 import FP8_BLOCK
from compiled_mtp.ops.silu_mul import silu_mul, silu_mul_quantized
from op_cases import (
    BF16,
    FP8,
    FP32,
    ROWS,
    LaunchCase,
    ModelShape,
    OpCase,
    check_reference,
    dtype_label,
    launch,
)
from op_cases.quantize_rows import MAX_QUANTISED_ERROR, make_rows


def alternative(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def cases(shape: ModelShape, rows: int, settings: Mapping[str, int]) -> list[OpCase]:
    """Return a rounded and a quantised case, none for a model without a dense MLP."""
    width = shape.intermediate
    if not width:
        return []

    make = functools.partial(make_rows, rows=rows, width=2 * width)
    quantised_bytes = rows * (4 * width + width + 4 * width // FP8_BLOCK)
    check = functools.partial(check_reference, silu_mul, most=4e-3)
    check_quantised = functools.partial(check_reference, silu_mul_quantized, most=MAX_QUANTISED_ERROR)
    return [
        OpCase(f"{width}", make, silu_mul, 2 * 3 * rows * width, check, alternative, "two kernels"),
        OpCase(f"{width} quantised", make, silu_mul_quantized, quantised_bytes, check_quantised),
    ]


def launches(capability: int) -> Iterator[LaunchCase]:
    make = functools.partial(make_rows, rows=ROWS, width=2 * 17408)
    for dtype in (BF16, FP32):
        yield launch(dtype_label(dtype), silu_mul, functools.partial(make, dtype=dtype))
    yield launch("bf16-quantized", silu_mul_quantized, make, FP8)
