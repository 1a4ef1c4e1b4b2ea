"""Cases of `rms_norm`, `add_rms_norm`, `add_rms_norm_quantized` and `pair_norm`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from compiled_mtp.ops.fp8 import FP8_BLOCK
from compiled_mtp.ops.rms_norm import add_rms_norm, add_rms_norm_quantized, pair_norm, rms_norm
from compiled_mtp.ops.shares import add_tree
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
    dtype_label,
    launch,
    tensor,
)
from op_cases.quantize_rows import check_quantized


def exact(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * (1.0 + weight.double())


def check_norm(args: tuple[torch.Tensor, ...]) -> None:
    x, weight = args
    torch.testing.assert_close(rms_norm(x, weight, EPS).double(), exact(x, weight), rtol=4.1e-3, atol=1e-6)


def check_add(args: tuple[torch.Tensor, ...]) -> None:
    x, residual, weight = args
    y, new_residual = add_rms_norm(x, residual, weight, EPS)
    if x.dim() == 3:
        x = add_tree(x).bfloat16()
    assert torch.equal(new_residual, x + residual), "the new residual is not the rounded sum"
    torch.testing.assert_close(y.double(), exact(new_residual, weight), rtol=4.1e-3, atol=1e-6)


def check_groups(args: tuple[torch.Tensor, ...]) -> None:
    x, residual, weight = args
    norm, new_residual, values, factors = add_rms_norm_quantized(x, residual, weight, EPS)
    check_quantized(values, factors, norm)
    wanted = add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(norm, wanted[0]), "the norm has other bits than add_rms_norm's"
    assert torch.equal(new_residual, wanted[1]), "the residual has other bits than add_rms_norm's"


def torch_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, EPS)


def torch_add_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    added = x + residual
    return torch_norm(added, weight), added


def check_pair(args: tuple[torch.Tensor, ...]) -> None:
    table, ids, hidden, embedding_weight, hidden_weight = args
    halves = exact(table[ids], embedding_weight), exact(hidden, hidden_weight)
    got = pair_norm(table, ids, hidden, embedding_weight, hidden_weight, EPS).double()
    torch.testing.assert_close(got, torch.cat(halves, 1), rtol=4.1e-3, atol=1e-6)


def torch_pair(
    table: torch.Tensor, ids: torch.Tensor, hidden: torch.Tensor, *weights: torch.Tensor
) -> torch.Tensor:
    return torch.cat((torch_norm(table[ids], weights[0]), torch_norm(hidden, weights[1])), 1)


def make_inputs(
    device: Any, seed: int | None, rows: int, width: int, parts: int = 0, dtype: torch.dtype = BF16
) -> tuple[torch.Tensor, ...]:
    """Rows, or float32 parts of them, a residual and the norm's weight."""
    random = Source(device, seed).normal
    x = random(parts, rows, width) if parts else random(rows, width, dtype=dtype)
    return x, random(rows, width, dtype=dtype), random(width, dtype=dtype)


def make_alone(device: Any, seed: int | None, **given: Any) -> tuple[torch.Tensor, ...]:
    """Rows and the norm's weight."""
    return make_inputs(device, seed, **given)[::2]


def make_pair(
    device: Any, seed: int | None, rows: int, width: int, table_rows: int = 4096, dtype: torch.dtype = BF16
) -> tuple[torch.Tensor, ...]:
    """A table of embeddings, ids, hidden rows and two norms' weights."""
    hidden, weight = make_alone(device, seed, rows=rows, width=width, dtype=dtype)
    source = Source(device, seed)
    table = source.normal(table_rows, width, dtype=dtype)
    ids = torch.randint(0, table_rows, (rows,), device=device, generator=source.generator)
    return table, ids, hidden, weight, weight.clone()


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rms_norm(x, weight, EPS)


def add(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
    return add_rms_norm(x, residual, weight, EPS)


def add_quantized(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
    return add_rms_norm_quantized(x, residual, weight, EPS)


def add_kept(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
    """Of some rows."""
    return add_rms_norm(x, residual, weight, EPS, tensor(x.device, 1, dtype=INT64))


pair = functools.partial(pair_norm, eps=EPS)


def cases(shape: ModelShape, rows: int, settings: Mapping[str, int]) -> list[OpCase]:
    """The norm of a hidden row, alone, with the residual (in --set parts=N parts, 2 by rule), quantised, and
    beside that of an embedding."""
    width, parts = shape.hidden, settings.get("parts", 2)
    size: dict[str, Any] = {"rows": rows, "width": width}
    row, weight = 2 * rows * width, 2 * width
    of_parts = functools.partial(make_inputs, **size, parts=parts)
    quantised = rows * (width + 4 * width // FP8_BLOCK)
    made: list[tuple[str, Any, Any, int, Any, Any]] = [
        ("norm", functools.partial(make_alone, **size), norm, 2 * row, check_norm, torch_norm),
        ("add norm", functools.partial(make_inputs, **size), add, 4 * row, check_add, torch_add_norm),
        (f"add norm of {parts} parts", of_parts, add, (3 + 2 * parts) * row, check_add, None),
        (
            f"add norm of {parts} parts, quantised",
            of_parts,
            add_quantized,
            (3 + 2 * parts) * row + quantised,
            check_groups,
            None,
        ),
        ("pair norm", functools.partial(make_pair, **size), pair, 4 * row + weight, check_pair, torch_pair),
    ]
    return [
        OpCase(f"{label} {width}", make, call, moved + weight, check, other, "torch" if other else "none")
        for label, make, call, moved, check, other in made
    ]


def launches(capability: int) -> Iterator[LaunchCase]:
    for dtype, width in ((BF16, 5120), (BF16, 2560), (BF16, 2048), (BF16, 1024), (FP32, 1024)):
        size: dict[str, Any] = {"rows": ROWS, "width": width, "dtype": dtype}
        kinds: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
            "alone": (norm, functools.partial(make_alone, **size)),
            "add": (add, functools.partial(make_inputs, **size)),
            "add-parts": (add, functools.partial(make_inputs, **size, parts=4)),
            "add-kept-parts": (add_kept, functools.partial(make_inputs, **size, parts=4)),
            "pair": (pair, functools.partial(make_pair, **size)),
        }
        for kind, (call, make) in kinds.items():
            yield launch(f"{kind}-{width}-{dtype_label(dtype)}", call, make)
    for width in (5120, 2048):
        make = functools.partial(make_inputs, rows=ROWS, width=width, parts=4)
        yield launch(f"add-quantized-{width}-bf16", add_quantized, make, FP8)
