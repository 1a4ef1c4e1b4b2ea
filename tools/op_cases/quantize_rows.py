"""Cases of `quantize_rows`: what attention and GDN give to their output projections."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from compiled_mtp.ops.fp8 import FP8_BLOCK, quantized_values
from compiled_mtp.ops.quantize_rows import quantize_rows
from op_cases import BF16, FP8, ROWS, LaunchCase, ModelShape, OpCase, Source, launch

# Half a step of e4m3, and what the factor's rounding adds.
MAX_ERROR = 0.0626


def check_quantized(values: torch.Tensor, factors: torch.Tensor, x: torch.Tensor) -> None:
    """Raise AssertionError unless values * factors is x to within half a step of e4m3."""
    exact = x.double()
    error = (quantized_values(values, factors).double() - exact).abs()
    # Below 2^-6 of the factor the steps of e4m3 are all alike.
    step = torch.maximum(exact.abs(), factors.double().repeat_interleave(FP8_BLOCK, 1) * 2.0**-6)
    worst = float((error / step).max())
    assert worst < MAX_ERROR, f"an error of {worst:.3f} of a value"


def make_rows(
    device: Any, seed: int | None, rows: int, width: int, dtype: torch.dtype = BF16
) -> tuple[torch.Tensor, ...]:
    """Random rows alone."""
    return (Source(device, seed).normal(rows, width, dtype=dtype),)


def cases(shape: ModelShape, rows: int, settings: Mapping[str, int]) -> list[OpCase]:
    """Rows as wide as the inputs of GDN's and of attention's output projection."""
    widths = (shape.linear_value_heads * shape.linear_head_dim, shape.query_heads * shape.head_dim)

    def case(width: int) -> OpCase:
        make = functools.partial(make_rows, rows=rows, width=width)
        moved = rows * (3 * width + 4 * width // FP8_BLOCK)
        return OpCase(
            f"{width}", make, quantize_rows, moved, lambda a: check_quantized(*quantize_rows(*a), *a)
        )

    return [case(width) for width in sorted(set(widths))]


def launches(capability: int) -> Iterator[LaunchCase]:
    make = functools.partial(make_rows, rows=ROWS, width=5120)
    yield launch("5120", quantize_rows, make, FP8)
