"""Cases of `linear`: every projection of a decode step, and the output head."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from compiled_mtp.ops.linear import linear
from op_cases import ModelShape, OpCase


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


def check(args: tuple[torch.Tensor | None, ...]) -> None:
    x, weight, weight_scale = args
    assert x is not None
    assert weight is not None
    y = linear(x, weight, weight_scale)
    for first in range(0, weight.shape[0], 8192):
        part = weight[first : first + 8192].double()
        if weight_scale is not None:
            scale = weight_scale[first // 128 : first // 128 + 64].double()
            scale = scale.repeat_interleave(128, 0)[: part.shape[0]].repeat_interleave(128, 1)
            part = part * scale[:, : part.shape[1]]
        exact = x.double() @ part.T
        error = (y[:, first : first + 8192].double() - exact).norm() / exact.norm()
        assert error < 3e-3, f"relative error {error:.1e} in columns from {first}"


def cases(shape: ModelShape, rows: int, settings: Mapping[str, int]) -> list[OpCase]:
    """Each projection with bf16 weights, then with FP8 weights unless --set fp8=0 (the head stays bf16)."""
    result = []
    for fp8 in (False, True) if settings.get("fp8", 1) else (False,):
        for name, (n, k) in projections(shape, fp8).items():

            def make_inputs(
                device: str, seed: int, n: int = n, k: int = k, fp8: bool = fp8
            ) -> tuple[torch.Tensor | None, ...]:
                generator = torch.Generator(device).manual_seed(seed)
                x = torch.randn(rows, k, dtype=torch.bfloat16, device=device, generator=generator)
                weight = torch.randn(n, k, dtype=torch.bfloat16, device=device, generator=generator)
                if not fp8:
                    return x, weight * k**-0.5, None
                scale = (
                    torch.rand(-(-n // 128), -(-k // 128), device=device, generator=generator) * 1e-3 + 1e-4
                )
                return x, (weight * 50).to(torch.float8_e4m3fn), scale

            moved = n * k * (1 if fp8 else 2) + 2 * rows * (n + k)
            label = f"{name} {n}x{k} {'fp8' if fp8 else 'bf16'}"
            if fp8:
                result.append(OpCase(label, make_inputs, linear, moved, check))
            else:
                result.append(OpCase(label, make_inputs, linear, moved, check, cublas, "cuBLAS"))
    return result


def cublas(x: torch.Tensor, weight: torch.Tensor, weight_scale: None) -> torch.Tensor:
    return torch.nn.functional.linear(x, weight)
