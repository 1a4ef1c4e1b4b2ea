"""Cases of `spec_conv1d` (rows of decode windows) and `conv_prefill` (--set prefill=1: one segment)."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from compiled_mtp.ops.spec_conv1d import conv_prefill, spec_conv1d
from op_cases import (
    BF16,
    FP32,
    PREFILL_ROWS,
    ROWS,
    SHAPES,
    LaunchCase,
    ModelShape,
    OpCase,
    Source,
    check_reference,
    dtype_label,
    launch,
)


def make_inputs(
    device: Any,
    seed: int | None,
    shape: ModelShape,
    batch: int,
    rows: int,
    prefill: bool,
    dtype: torch.dtype = BF16,
    states: int = 16,
) -> Any:
    source = Source(device, seed)
    normal, cursor = source.normal, functools.partial(source.full, batch)
    nk, nv, dim = shape.linear_key_heads, shape.linear_value_heads, shape.linear_head_dim
    channels = (2 * nk + nv) * dim

    return (
        normal(rows, channels + nv * dim + 2 * nv).to(dtype), normal(channels, 4).to(dtype),
        normal(nv), normal(nv), normal(batch + 1, states, channels).to(dtype),
        torch.arange(1, batch + 1, dtype=torch.int32, device=device), cursor(1024),
        *([cursor(rows), cursor(0)] if prefill else []), nk, nv, dim, dim,
    )  # fmt: skip


def cases(shape: ModelShape, rows: int, settings: Mapping[str, int]) -> list[OpCase]:
    """Return one case; --set query_len=W (4), or --set prefill=1 for `rows` rows of one prompt."""
    prefill = bool(settings.get("prefill", 0))
    query_len = rows if prefill else settings.get("query_len", 4)
    if rows % query_len:
        raise ValueError(f"rows must be a multiple of query_len, got {rows} and {query_len}; choose others")
    batch = rows // query_len
    channels = (2 * shape.linear_key_heads + shape.linear_value_heads) * shape.linear_head_dim
    operator: Any = conv_prefill if prefill else spec_conv1d
    history = 3 * batch * 2 * channels
    return [
        OpCase(
            label="prefill" if prefill else f"B={batch} W={query_len}",
            make_inputs=functools.partial(make_inputs, shape=shape, batch=batch, rows=rows, prefill=prefill),
            call=operator,
            bytes_moved=rows * channels * (2 + 4) + (0 if prefill else rows * channels * 2) + history,
            check=functools.partial(check_reference, operator, most=1e-5),
        )
    ]


def launches(capability: int) -> Iterator[LaunchCase]:
    for name, dtype in (("27b", BF16), ("4b", BF16), ("0.8b", BF16), ("0.8b", FP32)):
        make = functools.partial(make_inputs, shape=SHAPES[name], dtype=dtype, states=8)
        label = f"{SHAPES[name].linear_value_heads}-{dtype_label(dtype)}"
        window = functools.partial(make, batch=1, rows=ROWS, prefill=False)
        yield launch(label, spec_conv1d, window)
        yield launch(label, conv_prefill, functools.partial(make, batch=1, rows=PREFILL_ROWS, prefill=True))
        many = functools.partial(make, batch=32, rows=32 * ROWS, prefill=False)
        yield launch(f"{label}-windows", spec_conv1d, many)
