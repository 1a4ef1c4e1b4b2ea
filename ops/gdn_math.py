"""The gated delta rule on records and the gated norm, for the GDN specifications and CPU routes.

A record of a token is (k after l2norm, u = beta * (v - read), exp(g)). A record is applied to a state as
`S <- exp(g) S + u k^T`, both when a token is computed and when it is folded in later: the bits are the same.

So a round may leave records unfolded, which saves the write of a state: `gdn_verify` folds them again into
the copy that it steps over. It stores a state once its ring would not hold the next window.
"""

from __future__ import annotations

import torch

from compiled_mtp.ops.checks import fail
from compiled_mtp.ops.numerics import number, sigmoid, silu


def check_gdn_heads(Hk: int, Hv: int, gate_activation: str) -> None:
    """Raise ValueError for numbers of heads or a gate activation that no GDN layer has."""
    if Hv % Hk:
        raise fail("num_v_heads", "be a multiple of num_k_heads", (Hv, Hk), "check the config")
    if gate_activation not in ("silu", "sigmoid"):
        raise fail("gate_activation", "be 'silu' or 'sigmoid'", repr(gate_activation), "map swish to silu")


def apply_record(state: torch.Tensor, k: torch.Tensor, u: torch.Tensor, exp_g: torch.Tensor) -> None:
    """Advance `state` [n, dv, dk] in place by one token: k [n, dk], u [n, dv], exp_g [n]."""
    state.mul_(exp_g[..., None, None])
    state.addcmul_(u[..., None], k[..., None, :])


def gated_norm(
    out: torch.Tensor, z: torch.Tensor, norm_weight: torch.Tensor, eps: float, gate_activation: str
) -> torch.Tensor:
    """Return rmsnorm(out [M, nv, dv] f32) * norm_weight * act(z [M, nv*dv]), [M, nv*dv] in z's dtype."""
    gate = z.float()
    gate = (sigmoid(gate) if gate_activation == "sigmoid" else silu(gate)).view(out.shape)
    scale = (out * out).sum(-1, keepdim=True).mul_(number(1.0 / out.shape[-1])).add_(number(eps)).rsqrt_()
    y = (out * scale).mul_(norm_weight).mul_(gate).flatten(1)
    return y if z.dtype == torch.float32 else y.to(z.dtype)
