"""Cases of `gdn_verify`: from the convolution's outputs to the input of out_proj, one window per request."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from compiled_mtp.ops.gdn_verify import gdn_verify
from op_cases import (
    BF16,
    FP32,
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

MAX_RELATIVE_ERROR = 3e-3


def gate(source: Source, shape: ModelShape, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the columns z of a layer's projection q|k|v|z|b|a."""
    nk, nv, dim = shape.linear_key_heads, shape.linear_value_heads, shape.linear_head_dim
    first = 2 * nk * dim + nv * dim
    return source.normal(rows, first + nv * dim + 2 * nv).to(dtype)[:, first : first + nv * dim]


def make_inputs(
    device: Any,
    seed: int | None,
    shape: ModelShape,
    batch: int,
    query_len: int,
    accepted: int,
    dtype: torch.dtype = BF16,
    ring: int | None = None,
) -> Any:
    """Return arguments with which every request folds `accepted` ring entries of its last window."""
    source = Source(device, seed)
    normal, uniform = source.normal, source.uniform
    nk, nv, dim = shape.linear_key_heads, shape.linear_value_heads, shape.linear_head_dim
    rows, slots = batch * query_len, batch + 1
    ring = ring or (8 if query_len <= 4 else 16)

    unit, pos = dim**-0.5, source.full(batch, 100)
    return (
        normal(rows, nk, dim) * unit**2, normal(rows, nk, dim) * unit, normal(rows, nv, dim),
        uniform(rows, nv), uniform(rows, nv), gate(source, shape, rows, dtype),
        uniform(dim), normal(slots, nv, dim, dim),
        normal(slots, nk, ring, dim) * unit, normal(slots, nv, ring, dim), uniform(slots, nv, ring),
        torch.arange(1, slots, dtype=torch.int32, device=device), pos - accepted, pos, 1e-6, "silu",
    )  # fmt: skip


def cases(shape: ModelShape, rows: int, settings: Mapping[str, int]) -> list[OpCase]:
    """One case; --set query_len=W (4) and accepted=N (query_len - 1); rows = requests * query_len."""
    query_len = settings.get("query_len", 4)
    accepted = settings.get("accepted", max(query_len - 1, 1))
    if rows % query_len:
        raise ValueError(f"rows must be a multiple of query_len, got {rows} and {query_len}; choose others")
    batch = rows // query_len
    heads, dim = shape.linear_value_heads, shape.linear_head_dim
    states = 2 * batch * heads * dim * dim * 4
    vectors = rows * dim * (3 * shape.linear_key_heads * 4 + heads * (4 + 4 + 2 + 2))
    return [
        OpCase(
            label=f"B={batch} W={query_len} folds {accepted}",
            make_inputs=functools.partial(
                make_inputs, shape=shape, batch=batch, query_len=query_len, accepted=accepted
            ),
            call=gdn_verify,
            bytes_moved=states + vectors,
            check=functools.partial(check_reference, gdn_verify, most=MAX_RELATIVE_ERROR),
        )
    ]


def launches(capability: int) -> Iterator[LaunchCase]:
    for name, dtype, ring in (
        ("27b", BF16, 8),
        ("27b", BF16, 16),
        ("27b", FP32, 8),
        ("4b", BF16, 8),
        ("0.8b", BF16, 8),
    ):
        make = functools.partial(make_inputs, batch=1, query_len=ROWS, accepted=ROWS - 1, dtype=dtype)
        label = f"{SHAPES[name].linear_value_heads}-{dtype_label(dtype)}-ring{ring}"
        yield launch(label, gdn_verify, functools.partial(make, shape=SHAPES[name], ring=ring))
    for name in ("27b", "4b", "0.8b"):
        many = functools.partial(make_inputs, batch=32, query_len=ROWS, accepted=ROWS - 1)
        label = f"{SHAPES[name].linear_value_heads}-bf16-many"
        yield launch(label, gdn_verify, functools.partial(many, shape=SHAPES[name]))
