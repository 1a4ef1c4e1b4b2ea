"""Cases of `rms_norm`, `add_rms_norm`, `add_rms_norm_quantized` and `pair_norm`."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from compiled_mtp.ops.fp8 import FP8_BLOCK
from compiled_mtp.ops.rms_norm import add_rms_norm, add_rms_norm_quantized, pair_norm, rms_norm
from op_cases import (
    BF16,
    EPS,
    FP8,
    FP32,
    INT64,
    ROWS,
    LaunchCase,
    ModelShape,
    OpCase,
    Source,
    check_reference,
    dtype_label,
    launch,
    tensor,
)
from op_cases.quantize_rows import MAX_QUANTISED_ERROR


def torch_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)


def torch_add_norm(x: torch.Tensor, residual: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
    added = x + residual
    return torch_norm(added, *rest), added


def torch_pair(
    table: torch.Tensor, ids: torch.Tensor, hidden: torch.Tensor, first: torch.Tensor, *rest: Any
) -> torch.Tensor:
    return torch.cat((torch_norm(table[ids], first, rest[-1]), torch_norm(hidden, *rest)), 1)


def make_inputs(
    device: Any, seed: int | None, rows: int, width: int, partials: int = 0, dtype: torch.dtype = BF16
) -> tuple[Any, ...]:
    """Return rows, or float32 partials of them, a residual and the norm's weight."""
    random = Source(device, seed).normal
    x = random(partials, rows, width) if partials else random(rows, width, dtype=dtype)
    return x, random(rows, width, dtype=dtype), random(width, dtype=dtype), EPS


def make_alone(device: Any, seed: int | None, **given: Any) -> tuple[Any, ...]:
    """Return rows and the norm's weight."""
    x, _, *rest = make_inputs(device, seed, **given)
    return x, *rest


def make_kept_rows(device: Any, seed: int | None, **given: Any) -> tuple[Any, ...]:
    """Return the arguments of a norm of one chosen row."""
    return *make_inputs(device, seed, **given), tensor(device, 1, dtype=INT64)


def make_pair(
    device: Any, seed: int | None, rows: int, width: int, table_rows: int = 4096, dtype: torch.dtype = BF16
) -> tuple[Any, ...]:
    """Return a table of embeddings, ids, hidden rows and two norms' weights."""
    hidden, weight, eps = make_alone(device, seed, rows=rows, width=width, dtype=dtype)
    source = Source(device, seed)
    table = source.normal(table_rows, width, dtype=dtype)
    ids = torch.randint(0, table_rows, (rows,), device=device, generator=source.generator)
    return table, ids, hidden, weight, weight.clone(), eps


def cases(shape: ModelShape, rows: int, settings: Mapping[str, int]) -> list[OpCase]:
    """Return the norms of hidden rows: alone, with the residual, quantised, and paired with an embedding's.

    --set parts=N: the number of partials, 2 by default.
    """
    width, partials = shape.hidden, settings.get("parts", 2)
    row, weight, quantised = 2 * rows * width, 2 * width, rows * (width + 4 * width // FP8_BLOCK)
    of_partials = functools.partial(make_inputs, partials=partials)
    sums, moved = f"add norm of {partials} parts", (3 + 2 * partials) * row
    made: list[tuple[str, Any, Any, int, float, Any]] = [
        ("norm", make_alone, rms_norm, 2 * row, 4e-3, torch_norm),
        ("add norm", make_inputs, add_rms_norm, 4 * row, 4e-3, torch_add_norm),
        (sums, of_partials, add_rms_norm, moved, 4e-3, None),
        (
            f"{sums}, quantised",
            of_partials,
            add_rms_norm_quantized,
            moved + quantised,
            MAX_QUANTISED_ERROR,
            None,
        ),
        ("pair norm", make_pair, pair_norm, 4 * row + weight, 4e-3, torch_pair),
    ]
    return [
        OpCase(
            f"{label} {width}",
            functools.partial(make, rows=rows, width=width),
            operator,
            size + weight,
            functools.partial(check_reference, operator, most=most),
            other,
            "torch" if other else "none",
        )
        for label, make, operator, size, most, other in made
    ]


def launches(capability: int) -> Iterator[LaunchCase]:
    for dtype, width in ((BF16, 5120), (BF16, 2560), (BF16, 2048), (BF16, 1024), (FP32, 1024)):
        kinds: dict[str, tuple[Any, Any]] = {
            "alone": (rms_norm, make_alone),
            "add": (add_rms_norm, make_inputs),
            "add-parts": (add_rms_norm, functools.partial(make_inputs, partials=4)),
            "add-kept-parts": (add_rms_norm, functools.partial(make_kept_rows, partials=4)),
            "pair": (pair_norm, make_pair),
        }
        for kind, (call, make) in kinds.items():
            made = functools.partial(make, rows=ROWS, width=width, dtype=dtype)
            yield launch(f"{kind}-{width}-{dtype_label(dtype)}", call, made)
    for width in (5120, 2048):
        make = functools.partial(make_inputs, rows=ROWS, width=width, partials=4)
        yield launch(f"add-quantized-{width}-bf16", add_rms_norm_quantized, make, FP8)
