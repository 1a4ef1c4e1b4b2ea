"""What the GDN specifications and CPU routes share: the gated delta rule on records, and the gated norm.

A record of a token is (k after l2norm, u = beta * (v - read), exp(g)). Applying it is `S <- exp(g) S + u
k^T`, whether the token is being stepped over or folded in later, so that both ways reach the same bits.
"""

from __future__ import annotations

import torch

from compiled_mtp.ops.checks import fail
from compiled_mtp.ops.numerics import sigmoid, silu


def check_gdn_heads(Hk: int, Hv: int, gate_activation: str) -> None:
    """Raise ValueError for what no GDN layer has."""
    if Hv % Hk:
        raise fail("num_v_heads", "be a multiple of num_k_heads", (Hv, Hk), "check the config")
    if gate_activation not in ("silu", "sigmoid"):
        raise fail("gate_activation", "be 'silu' or 'sigmoid'", repr(gate_activation), "map swish to silu")


def apply_record(state: torch.Tensor, k: torch.Tensor, u: torch.Tensor, exp_g: torch.Tensor) -> None:
    """Advance `state` [n, dv, dk] in place by one token: k [n, dk], u [n, dv], exp_g [n]."""
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
) -> bool:
    """Advance `state` [B, nv, dv, dk] in place by the records of positions [begin, end) of each request.

    Reads ring_k [slots, nk, R, dk], ring_u [slots, nv, R, dv], ring_g [slots, nv, R] (exp(g)) at
    state_index [B] and position mod R. A request with fewer records than another keeps its state exactly.
    Returns whether any request had a record.
    """
    batch, num_v_heads, head_v_dim, head_k_dim = state.shape
    counts = (end - begin).tolist()
    steps = max(counts, default=0)
    if steps <= 0:
        return False
    offsets = torch.arange(steps, device=state.device)
    places = (state_index.long(), slice(None), (begin + offsets[:, None]) % ring_k.shape[2])
    k = ring_k[places]  # [steps, B, nk, dk]
    u = ring_u[places]  # [steps, B, nv, dv]
    exp_g = ring_g[places]  # [steps, B, nv]
    if min(counts) < steps:
        # S * 1 + (-0) is S for every S, whatever the masked record holds.
        absent = (offsets[:, None] >= (end - begin))[..., None]
        exp_g = exp_g.masked_fill(absent, 1.0)
        k = k.masked_fill(absent[..., None], 1.0)
        u = u.masked_fill(absent[..., None], -0.0)
    group = num_v_heads // k.shape[2]
    k = k[:, :, :, None].expand(-1, -1, -1, group, -1).reshape(steps, batch * num_v_heads, head_k_dim)
    u = u.view(steps, batch * num_v_heads, head_v_dim)
    exp_g = exp_g.view(steps, batch * num_v_heads)
    heads = state.view(batch * num_v_heads, head_v_dim, head_k_dim)
    for step in range(steps):
        apply_record(heads, k[step], u[step], exp_g[step])
    return True


def gated_norm(
    out: torch.Tensor, z: torch.Tensor, norm_weight: torch.Tensor, eps: float, gate_activation: str
) -> torch.Tensor:
    """rmsnorm(out) * norm_weight * act(z), [M, nv*dv] in z's dtype: out [M, nv, dv] f32, z [M, nv*dv]."""
    gate = z.float().reshape(out.shape)
    gate = sigmoid(gate) if gate_activation == "sigmoid" else silu(gate)
    scale = torch.rsqrt((out * out).sum(-1, keepdim=True) / out.shape[-1] + eps)
    return (out * scale * norm_weight * gate).to(z.dtype).flatten(1)
