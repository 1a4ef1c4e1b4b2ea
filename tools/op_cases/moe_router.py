"""Cases of `moe_router`."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from compiled_mtp.ops.moe_router import moe_router, recorded_router
from op_cases import BLOCK_SIZE, ROWS, LaunchCase, ModelShape, OpCase, Source, check_reference, launch


def make_inputs(device: Any, seed: int | None, rows: int, experts: int, top_k: int) -> tuple[Any, ...]:
    return Source(device, seed).normal(rows, experts + 1) * 2, top_k, True


def make_recorded(device: Any, seed: int | None, rows: int, experts: int, top_k: int) -> tuple[Any, ...]:
    source = Source(device, seed)
    slots = torch.zeros(rows, dtype=torch.int64, device=device)
    record = torch.zeros(2, BLOCK_SIZE * top_k, dtype=torch.int16, device=device)
    return source.normal(rows, experts + 1) * 2, top_k, True, slots, record


def cases(shape: ModelShape, rows: int, settings: Mapping[str, int]) -> list[OpCase]:
    """Return the router of one block."""
    if not shape.experts:
        raise ValueError(f"shape must be a mixture of experts, got {shape.name}; try 35b-a3b")
    make = functools.partial(make_inputs, rows=rows, experts=shape.experts, top_k=shape.top_k)
    moved = rows * (4 * (shape.experts + 1) + 8 * (shape.top_k + 1))
    # A wrong expert is an error of at least 1e-4.
    check = functools.partial(check_reference, moe_router, most=1e-5)
    return [OpCase("router", make, moe_router, moved, check)]


def launches(capability: int) -> Iterator[LaunchCase]:
    for experts, top_k in ((256, 8), (512, 10)):
        make = functools.partial(make_inputs, rows=ROWS, experts=experts, top_k=top_k)
        yield launch(f"{experts}-{top_k}", moe_router, make)
        recorded = functools.partial(make_recorded, rows=ROWS, experts=experts, top_k=top_k)
        yield launch(f"recorded-{experts}-{top_k}", recorded_router, recorded)
