"""Checks and registration of gdn_verify."""

from __future__ import annotations

from typing import Any

import torch

from compiled_mtp.ops.checks import check_dtype, check_last_contiguous, check_shape, fail
from compiled_mtp.ops.gdn_verify import reference
from compiled_mtp.ops.registry import register


def _fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    exp_g: torch.Tensor,
    beta: torch.Tensor,
    z: torch.Tensor,
    *_: object,
) -> torch.Tensor:
    return torch.empty(tuple(z.shape), dtype=z.dtype, device=z.device)


def _launch(*args: Any) -> Any:
    from compiled_mtp.ops.gdn_verify.kernel import launch

    return launch(*args)


def _check_gdn_verify(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    exp_g: torch.Tensor,
    beta: torch.Tensor,
    z: torch.Tensor,
    norm_weight: torch.Tensor,
    state: torch.Tensor,
    ring_k: torch.Tensor,
    ring_u: torch.Tensor,
    ring_g: torch.Tensor,
    state_index: torch.Tensor,
    base: torch.Tensor,
    pos: torch.Tensor,
    eps: float,
    gate_activation: str,
) -> None:
    rows, num_v_heads, head_v_dim = v.shape
    num_k_heads, head_k_dim = k.shape[1], k.shape[2]
    batch = state_index.shape[0]
    remedy = "pass the outputs of spec_conv1d"
    if rows % batch:
        raise fail("v", "have the same number of rows for each request", (rows, batch), "pad windows")
    if num_v_heads % num_k_heads:
        raise fail(
            "num_v_heads", "be a multiple of num_k_heads", (num_v_heads, num_k_heads), "check the config"
        )
    check_shape("q", q, (rows, num_k_heads, head_k_dim), remedy)
    check_shape("k", k, (rows, num_k_heads, head_k_dim), remedy)
    check_shape("exp_g", exp_g, (rows, num_v_heads), remedy)
    check_shape("beta", beta, (rows, num_v_heads), remedy)
    check_shape("z", z, (rows, num_v_heads * head_v_dim), "slice the z columns of the projection")
    check_shape("norm_weight", norm_weight, (head_v_dim,), "pass linear_attn.norm.weight")
    check_shape("state", state, (None, num_v_heads, head_v_dim, head_k_dim), "allocate it with StateCache")
    check_shape(
        "ring_k", ring_k, (state.shape[0], num_k_heads, None, head_k_dim), "allocate it with StateCache"
    )
    ring_length = ring_k.shape[2]
    check_shape(
        "ring_u", ring_u, (state.shape[0], num_v_heads, ring_length, head_v_dim), "use ring_k's length"
    )
    check_shape("ring_g", ring_g, (state.shape[0], num_v_heads, ring_length), "use ring_k's length")
    if ring_length < 2 * (rows // batch):
        raise fail(
            "ring length", f"be at least 2*W = {2 * (rows // batch)}", ring_length, "use a longer ring"
        )
    check_shape("base", base, (batch,), "pass one cursor a request")
    check_shape("pos", pos, (batch,), "pass one cursor a request")
    check_last_contiguous("z", z)
    check_dtype("z", z, (torch.float32, torch.bfloat16), "cast the activations")
    for name, tensor in (
        ("q", q), ("k", k), ("v", v), ("exp_g", exp_g), ("beta", beta), ("norm_weight", norm_weight),
        ("state", state), ("ring_k", ring_k), ("ring_u", ring_u), ("ring_g", ring_g),
    ):  # fmt: skip
        check_dtype(name, tensor, (torch.float32,), "keep it in float32")
        if not tensor.is_contiguous():
            raise fail(name, "be contiguous", list(tensor.stride()), "pass a contiguous tensor")
    if gate_activation not in ("silu", "sigmoid"):
        raise fail("gate_activation", "be 'silu' or 'sigmoid'", repr(gate_activation), "map swish to silu")


_OP = register(
    "gdn_verify",
    reference.gdn_verify,
    _fake,
    mutates=("state", "ring_k", "ring_u", "ring_g"),
    launch=_launch,
    check=_check_gdn_verify,
)


def gdn_verify(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    exp_g: torch.Tensor,
    beta: torch.Tensor,
    z: torch.Tensor,
    norm_weight: torch.Tensor,
    state: torch.Tensor,
    ring_k: torch.Tensor,
    ring_u: torch.Tensor,
    ring_g: torch.Tensor,
    state_index: torch.Tensor,
    base: torch.Tensor,
    pos: torch.Tensor,
    eps: float,
    gate_activation: str,
) -> torch.Tensor:
    """Fold the records of positions [base, pos) into the state, store it, and step over B windows of W rows.

    q (l2norm, scaled), k (l2norm) [B*W, nk, dk], v [B*W, nv, dv], exp_g, beta [B*W, nv], all f32; z
    [B*W, nv*dv] float32 or bfloat16 (row stride free); norm_weight [dv] f32, used as it is. Mutated: state
    [slots, nv, dv, dk] f32, ring_k [slots, nk, R, dk], ring_u [slots, nv, R, dv], ring_g [slots, nv, R] f32
    (holds exp(g)); the records of the window are written at (pos + t) mod R and are not folded by this call.
    state_index [B] int32, base, pos [B] int64, gate_activation "silu" or "sigmoid".
    Per token: S <- exp(g) S; u = beta (v - S k); S <- S + u k^T; o = S q; y = rmsnorm(o, eps) norm_weight
    act(z). Value head j uses key head j // (nv / nk). A window of W tokens has the bits of W windows of one
    token. Returns y [B*W, nv*dv] in z's dtype. Raises ValueError for shapes and dtypes that do not fit.
    Source: Gated Delta Networks, arXiv 2412.06464.
    """
    return _OP(
        q, k, v, exp_g, beta, z, norm_weight, state, ring_k, ring_u, ring_g,
        state_index, base, pos, eps, gate_activation,
    )  # fmt: skip
