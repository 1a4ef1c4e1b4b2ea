"""What the GDN references share: the gated delta rule on records, and the gated norm.

A record of a token is (k after l2norm, u = beta * (v - read), exp(g)). Applying it is `S <- exp(g) S + u
k^T`, whether the token is being stepped over or folded in later, so that both ways reach the same bits.
"""

from __future__ import annotations

import torch

from compiled_mtp.ops.numerics import sigmoid, silu


def apply_record(state: torch.Tensor, k: torch.Tensor, u: torch.Tensor, exp_g: torch.Tensor) -> None:
    """Advance `state` [B, nv, dv, dk] in place by one token: k [B, nv, dk], u [B, nv, dv], exp_g [B, nv]."""
    state.mul_(exp_g[..., None, None])
    state.addcmul_(u[..., None], k[..., None, :])


def fold_records(
    state: torch.Tensor,
    ring_k: torch.Tensor,
    ring_u: torch.Tensor,
    ring_g: torch.Tensor,
    state_index: torch.Tensor,
    begin: torch.Tensor,
    end: torch.Tensor,
) -> None:
    """Advance `state` [B, nv, dv, dk] in place by the records of positions [begin, end) of each request.

    Reads ring_k [slots, nk, R, dk], ring_u [slots, nv, R, dv], ring_g [slots, nv, R] (exp(g)) at
    state_index [B] and position mod R. A request with fewer records than another keeps its state exactly.
    """
    ring_length = ring_k.shape[2]
    count = end - begin
    steps = int(count.max()) if count.numel() else 0
    if steps <= 0:
        return
    offsets = torch.arange(steps, device=state.device)
    slots = state_index.long()[:, None]
    rows = (begin[:, None] + offsets) % ring_length
    k = ring_k[slots, :, rows]  # [B, steps, nk, dk]
    u = ring_u[slots, :, rows]  # [B, steps, nv, dv]
    exp_g = ring_g[slots, :, rows]  # [B, steps, nv]
    if int(count.min()) < steps:
        # S * 1 + (-0) is S for every S, whatever the masked record holds.
        absent = (offsets >= count[:, None])[..., None]
        exp_g = exp_g.masked_fill(absent, 1.0)
        k = k.masked_fill(absent[..., None], 1.0)
        u = u.masked_fill(absent[..., None], -0.0)
    k = k.repeat_interleave(u.shape[2] // k.shape[2], dim=2)
    for step in range(steps):
        apply_record(state, k[:, step], u[:, step], exp_g[:, step])


def gated_norm(
    out: torch.Tensor, z: torch.Tensor, norm_weight: torch.Tensor, eps: float, gate_activation: str
) -> torch.Tensor:
    """rmsnorm(out) * norm_weight * act(z), [M, nv*dv] in z's dtype: out [M, nv, dv] f32, z [M, nv*dv]."""
    gate = z.float().reshape(out.shape)
    gate = sigmoid(gate) if gate_activation == "sigmoid" else silu(gate)
    scale = torch.rsqrt((out * out).sum(-1, keepdim=True) / out.shape[-1] + eps)
    return (out * scale * norm_weight * gate).to(z.dtype).flatten(1)
