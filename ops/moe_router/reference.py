"""Softmax, top-k and the shared expert's gate, per row and in a fixed order."""

from __future__ import annotations

import math

import torch

from compiled_mtp.ops.numerics import sigmoid


def moe_router(logits: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose `top_k` experts a row; the specification that the kernel follows (shapes and rules: see op.py).

    The choice is made on the logits, which the softmax orders the same way: two implementations whose `exp`
    differ by a rounding still choose the same experts. Sums run one by one (cumsum): no row depends on M.
    """
    routed, shared = logits[:, :-1], logits[:, -1:]
    ranked = torch.where(torch.isnan(routed), -math.inf, routed)
    ids = ranked.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weight = torch.exp(routed - routed.amax(-1, keepdim=True))
    chosen = weight.gather(1, ids)
    total = (chosen if renormalize else weight).cumsum(-1)[:, -1:]
    shared_id = torch.full_like(ids[:, :1], routed.shape[1])
    weights = torch.cat([chosen / total, sigmoid(shared)], dim=1)
    return weights, torch.cat([ids, shared_id], dim=1).to(torch.int32)
