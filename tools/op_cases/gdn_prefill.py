"""Cases of `gdn_prefill`: one prompt segment of `rows` tokens, between conv_prefill and out_proj."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from compiled_mtp.ops.gdn_prefill import gdn_prefill
from op_cases import (
    BF16,
    FP32,
    PREFILL_ROWS,
    SHAPES,
    LaunchCase,
    ModelShape,
    OpCase,
    Source,
    check_reference,
    dtype_label,
    launch,
)
from op_cases.gdn_verify import gate

MAX_RELATIVE_ERROR = 6e-3


def make_inputs(
    device: Any, seed: int | None, shape: ModelShape, rows: int, dtype: torch.dtype = BF16
) -> Any:
    source = Source(device, seed)
    normal, cursor = source.normal, functools.partial(source.full, 1)
    nk, nv, dim = shape.linear_key_heads, shape.linear_value_heads, shape.linear_head_dim

    def unit(*size: int) -> torch.Tensor:
        return torch.nn.functional.normalize(normal(*size), dim=-1)

    return (
        unit(rows, nk, dim) * dim**-0.5, unit(rows, nk, dim), normal(rows, nv, dim),
        -normal(rows, nv).exp() * 0.1, torch.sigmoid(normal(rows, nv)),
        gate(source, shape, rows, dtype), normal(dim), normal(2, nv, dim, dim) * 0.1,
        cursor(1, torch.int32), cursor(1024), cursor(rows), cursor(0), 1e-6, "silu",
    )  # fmt: skip


def cases(shape: ModelShape, rows: int, settings: Mapping[str, int]) -> list[OpCase]:
    """Return one case; bytes count inputs, output and state, not what passes between the launches."""
    heads, dim = shape.linear_value_heads, shape.linear_head_dim
    vectors = rows * dim * (2 * shape.linear_key_heads * 4 + heads * (4 + 2 + 2))
    return [
        OpCase(
            label="one segment",
            make_inputs=functools.partial(make_inputs, shape=shape, rows=rows),
            call=gdn_prefill,
            bytes_moved=vectors + 2 * heads * dim * dim * 4,
            check=functools.partial(check_reference, gdn_prefill, most=MAX_RELATIVE_ERROR),
        )
    ]


def launches(capability: int) -> Iterator[LaunchCase]:
    for name, dtype in (("27b", BF16), ("4b", BF16), ("0.8b", BF16), ("0.8b", FP32)):
        make = functools.partial(make_inputs, shape=SHAPES[name], rows=PREFILL_ROWS, dtype=dtype)
        yield launch(f"{SHAPES[name].linear_value_heads}-{dtype_label(dtype)}", gdn_prefill, make)
