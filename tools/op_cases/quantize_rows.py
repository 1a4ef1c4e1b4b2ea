"""Cases of `quantize_rows`: what attention and GDN give to their output projections."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from compiled_mtp.ops.fp8 import FP8_BLOCK
from compiled_mtp.ops.quantize_rows import quantize_rows
from op_cases import BF16, FP8, ROWS, LaunchCase, ModelShape, OpCase, Source, check_reference, launch

# Values halfway between two e4m3 steps may round either way.
MAX_QUANTISED_ERROR = 1e-2


def make_rows(
    device: Any, seed: int | None, rows: int, width: int, dtype: torch.dtype = BF16
) -> tuple[torch.Tensor, ...]:
    """Return random rows as the only argument."""
    return (Source(device, seed).normal(rows, width, dtype=dtype),)


def cases(shape: ModelShape, rows: int, settings: Mapping[str, int]) -> list[OpCase]:
    """Return rows as wide as the inputs of GDN's and of attention's output projection."""
    widths = (shape.linear_value_heads * shape.linear_head_dim, shape.query_heads * shape.head_dim)

    def case(width: int) -> OpCase:
        make = functools.partial(make_rows, rows=rows, width=width)
        moved = rows * (3 * width + 4 * width // FP8_BLOCK)
        check = functools.partial(check_reference, quantize_rows, most=MAX_QUANTISED_ERROR)
        return OpCase(f"{width}", make, quantize_rows, moved, check)

    return [case(width) for width in sorted(set(widths))]


def launches(capability: int) -> Iterator[LaunchCase]:
    make = functools.partial(make_rows, rows=ROWS, width=5120)
    yield launch("5120", quantize_rows, make, FP8)
