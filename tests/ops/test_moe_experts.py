"""moe_experts: against a float64 loop, row invariance, FP8 weights and registration."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compiled_mtp.ops.moe_experts import moe_experts


def routing(rows: int, experts: int, top_k: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random weights and distinct ids as moe_router gives them, the shared expert last."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(rows, experts, generator=generator).argsort(-1)[:, :top_k]
    ids = torch.cat([ids, torch.full((rows, 1), experts)], 1).to(torch.int32)
    return torch.rand(rows, top_k + 1, generator=generator), ids


def experts_case(
    rows: int, experts: int, top_k: int, width: int, inner: int, dtype: torch.dtype = torch.float32
) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(rows + 1)
    x = torch.randn(rows, width, generator=generator).to(dtype)
    gate_up = (torch.randn(experts + 1, 2 * inner, width, generator=generator) * width**-0.5).to(dtype)
    down = (torch.randn(experts + 1, width, inner, generator=generator) * inner**-0.5).to(dtype)
    return (x, *routing(rows, experts, top_k), gate_up, down)


def loop_float64(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    x, weights, gate_up, down = x.double(), weights.double(), gate_up.double(), down.double()
    inner = down.shape[2]
    out = torch.zeros_like(x)
    for row in range(x.shape[0]):
        for weight, expert in zip(weights[row], ids[row].tolist(), strict=True):
            gate = gate_up[expert, :inner] @ x[row]
            up = gate_up[expert, inner:] @ x[row]
            out[row] += weight * (down[expert] @ (gate / (1 + torch.exp(-gate)) * up))
    return out


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("rows", [1, 5, 33])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_matches_a_float64_loop(rows: int, dtype: torch.dtype, tolerance: float) -> None:
    case = experts_case(rows, 8, 3, 96, 40, dtype)
    assert relative_error(moe_experts(*case), loop_float64(*case)) < tolerance


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_rows_do_not_depend_on_their_company(threads: int) -> None:
    x, weights, ids, gate_up, down = experts_case(40, 8, 3, 192, 72)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = moe_experts(x, weights, ids, gate_up, down)
        for rows in (1, 2, 3, 7, 16):
            parts = zip(x.split(rows), weights.split(rows), ids.split(rows), strict=True)
            alone = torch.cat([moe_experts(*part, gate_up, down) for part in parts])
            assert torch.equal(alone, together)
    finally:
        torch.set_num_threads(before)


def test_errors() -> None:
    x, weights, ids, gate_up, down = experts_case(3, 4, 2, 32, 16)
    scale = torch.ones(5, 1, 1)
    cases = [
        ((x[0], weights, ids, gate_up, down), "x must have shape"),
        ((x.double(), weights, ids, gate_up, down), "x must have dtype"),
        ((x, weights, ids.long(), gate_up, down), "ids must have dtype"),
        ((x, weights, ids[:2], gate_up, down), "ids must have shape"),
        ((x, weights[:, :2], ids, gate_up, down), "weights must have shape"),
        ((x, weights, ids, gate_up[:4], down), "gate_up must have shape"),
        (
            (x, weights, ids, gate_up.transpose(1, 2).contiguous().transpose(1, 2), down),
            "gate_up must be contiguous",
        ),
        ((x, weights, ids, gate_up, down.bfloat16()), "down must have dtype"),
        ((x, weights, ids, gate_up, down, scale, None), "down_scale must be given with gate_up_scale"),
        ((x, weights, ids, gate_up, down, scale, scale), "gate_up must have dtype"),
    ]
    for arguments, message in cases:
        with pytest.raises(ValueError, match=message):
            moe_experts(*arguments)
