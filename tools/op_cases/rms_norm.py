"""Cases of `rms_norm`, `add_rms_norm`, `add_rms_norm_quantized` and `pair_norm`."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch

from compiled_mtp.ops.fp8 import FP8_BLOCK
from compiled_mtp.ops.rms_norm import add_rms_norm, add_rms_norm_quantized, pair_norm, rms_norm
from compiled_mtp.ops.shares import add_tree
from op_cases import ModelShape, OpCase
from op_cases.quantize_rows import check_quantized

EPS = 1e-6


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


def cases(shape: ModelShape, rows: int, settings: Mapping[str, int]) -> list[OpCase]:
    """The norm of a hidden row, alone, with the residual (in --set parts=N parts, 2 by rule), quantised, and
    beside that of an embedding."""
    width, parts = shape.hidden, settings.get("parts", 2)

    def make(count: int, device: str, seed: int) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator(device).manual_seed(seed)
        shapes = [(rows, width)] * count + [(width,)]
        return tuple(torch.randn(s, dtype=torch.bfloat16, device=device, generator=generator) for s in shapes)

    def make_pair(device: str, seed: int) -> tuple[torch.Tensor, ...]:
        hidden, *weights = make(1, device, seed)
        generator = torch.Generator(device).manual_seed(seed)
        table = torch.randn(4096, width, dtype=torch.bfloat16, device=device, generator=generator)
        ids = torch.randint(0, 4096, (rows,), device=device, generator=generator)
        return table, ids, hidden, *weights, weights[0].clone()

    def make_parts(device: str, seed: int) -> tuple[torch.Tensor, ...]:
        _, residual, weight = make(2, device, seed)
        generator = torch.Generator(device).manual_seed(seed)
        return torch.randn(parts, rows, width, device=device, generator=generator), residual, weight

    row_bytes, weight_bytes = 2 * rows * width, 2 * width
    return [
        OpCase(
            f"norm {width}",
            lambda device, seed: make(1, device, seed),
            lambda x, weight: rms_norm(x, weight, EPS),
            2 * row_bytes + weight_bytes,
            check_norm,
            torch_norm,
            "torch",
        ),
        OpCase(
            f"add norm {width}",
            lambda device, seed: make(2, device, seed),
            lambda x, residual, weight: add_rms_norm(x, residual, weight, EPS),
            4 * row_bytes + weight_bytes,
            check_add,
            torch_add_norm,
            "torch",
        ),
        OpCase(
            f"add norm of {parts} parts {width}",
            make_parts,
            lambda x, residual, weight: add_rms_norm(x, residual, weight, EPS),
            (3 + 2 * parts) * row_bytes + weight_bytes,
            check_add,
        ),
        OpCase(
            f"add norm of {parts} parts, quantised {width}",
            make_parts,
            lambda x, residual, weight: add_rms_norm_quantized(x, residual, weight, EPS),
            (3 + 2 * parts) * row_bytes + rows * (width + 4 * width // FP8_BLOCK) + weight_bytes,
            check_groups,
        ),
        OpCase(
            f"pair norm {width}",
            make_pair,
            functools.partial(pair_norm, eps=EPS),
            4 * row_bytes + 2 * weight_bytes,
            check_pair,
            torch_pair,
            "torch",
        ),
    ]
