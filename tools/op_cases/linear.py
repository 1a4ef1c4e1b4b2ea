"""Cases of `linear`, `linear_silu_mul` and `linear_parts`: every projection of a decode step, and the output
head; with --set prefill=1 those of a prompt's rows."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from compiled_mtp.ops.linear import count_parts, linear, linear_parts, linear_silu_mul
from compiled_mtp.ops.silu_mul import silu_mul
from op_cases import ModelShape, OpCase

# The products whose sums a norm adds up, and the one whose halves are multiplied.
BEFORE_NORM = ("gdn_out", "o", "down")
GATE_UP = "gate|up"


def projections(shape: ModelShape, fp8: bool = False) -> dict[str, tuple[int, int]]:
    """Rows and columns of each merged weight, or of those that an FP8 release stores in FP8.

    There b|a is bfloat16, and a product of its own.
    """
    key = shape.linear_key_heads * shape.linear_head_dim
    value = shape.linear_value_heads * shape.linear_head_dim
    query, kv = shape.query_heads * shape.head_dim, shape.kv_heads * shape.head_dim
    gates = 0 if fp8 else 2 * shape.linear_value_heads
    weights = {
        "qkvz" if fp8 else "qkvz|ba": (2 * key + 2 * value + gates, shape.hidden),
        "gdn_out": (shape.hidden, value),
        "q|k|v": (2 * query + 2 * kv, shape.hidden),
        "o": (shape.hidden, query),
    }
    if shape.intermediate:
        weights["gate|up"] = (2 * shape.intermediate, shape.hidden)
        weights["down"] = (shape.hidden, shape.intermediate)
    if not fp8:
        if shape.experts:
            weights["router"] = (shape.experts + 1, shape.hidden)
        weights["mtp_fc"] = (shape.hidden, 2 * shape.hidden)
        weights["lm_head"] = (shape.vocab, shape.hidden)
    return weights


def relative_error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


def call(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    name: str = "",
    is_prefill: bool = False,
) -> torch.Tensor:
    """The product as a layer has it: gate|up with what follows, those before a norm in parts."""
    if is_prefill:
        return linear(x, weight, weight_scale, False, True)
    if name in BEFORE_NORM:
        return linear_parts(x, weight, weight_scale, count_parts(weight, x.shape[0]))
    if name == GATE_UP:
        return linear_silu_mul(x, weight, weight_scale)
    return linear(x, weight, weight_scale)


def multiply(
    x: torch.Tensor, weight: torch.Tensor, kind: str, whole: tuple[int, int] = (0, 0), held: bool = False
) -> torch.Tensor:
    """The operator of a name's kind, of plain weights."""
    if kind == "gated":
        return linear_silu_mul(x, weight, None, *whole, held)
    if kind.startswith("parts"):
        return linear_parts(x, weight, None, int(kind.removeprefix("parts")), *whole, held=held)
    return linear(x, weight, None, kind == "logits", False, *whole, held)


def check(args: tuple[torch.Tensor | None, ...], name: str = "", is_prefill: bool = False) -> None:
    x, weight, weight_scale = args
    assert x is not None
    assert weight is not None
    y = linear(x, weight, weight_scale, False, is_prefill)
    for first in range(0, weight.shape[0], 8192):
        part = weight[first : first + 8192].double()
        if weight_scale is not None:
            scale = weight_scale[first // 128 : first // 128 + 64].double()
            scale = scale.repeat_interleave(128, 0)[: part.shape[0]].repeat_interleave(128, 1)
            part = part * scale[:, : part.shape[1]]
        error = relative_error(y[:, first : first + 8192], x.double() @ part.T)
        assert error < 3e-3, f"relative error {error:.1e} in columns from {first}"
    if is_prefill:
        return
    own = call(x, weight, weight_scale, name)
    if name in BEFORE_NORM:
        error = relative_error(own.double().sum(0), y.double())
        assert error < 5e-3, f"parts: relative error {error:.1e}"
    elif name == GATE_UP:
        assert torch.equal(own, silu_mul(y)), "silu_mul inside the product has other bits"


def cublas(x: torch.Tensor, weight: torch.Tensor, weight_scale: None) -> torch.Tensor:
    return torch.nn.functional.linear(x, weight)


def make_inputs(
    device: str, seed: int, rows: int, n: int, k: int, fp8: bool
) -> tuple[torch.Tensor | None, ...]:
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(rows, k, dtype=torch.bfloat16, device=device, generator=generator)
    weight = torch.randn(n, k, dtype=torch.bfloat16, device=device, generator=generator)
    if not fp8:
        return x, weight * k**-0.5, None
    scale = torch.rand(-(-n // 128), -(-k // 128), device=device, generator=generator) * 1e-3 + 1e-4
    return x, (weight * 50).to(torch.float8_e4m3fn), scale


def cases(shape: ModelShape, rows: int, settings: Mapping[str, int]) -> list[OpCase]:
    """Each projection with bf16 weights, then with FP8 weights unless --set fp8=0 (the head stays bf16)."""
    is_prefill = bool(settings.get("prefill", 0))
    result = []
    for fp8 in (False, True) if settings.get("fp8", 1) else (False,):
        for name, (n, k) in projections(shape, fp8).items():
            way: dict[str, Any] = {"name": name, "is_prefill": is_prefill}
            result.append(
                OpCase(
                    label=f"{name} {n}x{k} {'fp8' if fp8 else 'bf16'}" + " prefill" * is_prefill,
                    make_inputs=functools.partial(make_inputs, rows=rows, n=n, k=k, fp8=fp8),
                    call=functools.partial(call, **way),
                    bytes_moved=n * k * (1 if fp8 else 2) + 2 * rows * (n + k),
                    check=functools.partial(check, **way),
                    alternative=None if fp8 else cublas,
                    alternative_name="none" if fp8 else "cuBLAS",
                )
            )
    return result
