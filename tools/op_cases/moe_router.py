"""Cases of `moe_router`."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from compiled_mtp.ops.moe_router import moe_router
from op_cases import ModelShape, OpCase


def torch_router(logits: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    weights, ids = torch.softmax(logits[:, :-1], -1).topk(top_k, -1)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    shared = torch.full_like(ids[:, :1], logits.shape[1] - 1)
    return torch.cat([weights, torch.sigmoid(logits[:, -1:])], 1), torch.cat([ids, shared], 1).to(torch.int32)


def check(args: tuple[torch.Tensor, int, bool]) -> None:
    logits, top_k, renormalize = args
    weights, ids = moe_router(*args)
    wanted, wanted_ids = torch_router(logits.double(), top_k, renormalize)
    assert torch.equal(ids, wanted_ids), "other experts than float64 chooses"
    torch.testing.assert_close(weights.double(), wanted, rtol=1e-5, atol=1e-9)


def cases(shape: ModelShape, rows: int, settings: Mapping[str, int]) -> list[OpCase]:
    """The router of one block."""
    if not shape.experts:
        raise ValueError(f"shape must be a mixture of experts, got {shape.name}; try 35b-a3b")

    def make_inputs(device: str, seed: int) -> tuple[torch.Tensor, int, bool]:
        generator = torch.Generator(device).manual_seed(seed)
        return torch.randn(rows, shape.experts + 1, device=device, generator=generator) * 2, shape.top_k, True

    moved = rows * (4 * (shape.experts + 1) + 8 * (shape.top_k + 1))
    return [OpCase("router", make_inputs, moe_router, moved, check, torch_router, "torch softmax, topk")]
