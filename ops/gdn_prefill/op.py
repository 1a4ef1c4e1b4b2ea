"""Checks and registration of gdn_prefill."""

from __future__ import annotations

from typing import Any

import torch

from compiled_mtp.ops.checks import check_dtype, check_last_contiguous, check_shape, fail
from compiled_mtp.ops.gdn_prefill import reference
from compiled_mtp.ops.registry import register


def _fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    z: torch.Tensor,
    *_: object,
) -> torch.Tensor:
    return torch.empty(tuple(z.shape), dtype=z.dtype, device=z.device)


def _launch(*args: Any) -> Any:
    from compiled_mtp.ops.gdn_prefill.kernel import launch

    return launch(*args)


def _check_gdn_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    z: torch.Tensor,
    norm_weight: torch.Tensor,
    state: torch.Tensor,
    state_index: torch.Tensor,
    start: torch.Tensor,
    length: torch.Tensor,
    eps: float,
    gate_activation: str,
) -> None:
    rows, num_v_heads, head_v_dim = v.shape
    num_k_heads, head_k_dim = k.shape[1], k.shape[2]
    remedy = "pass the outputs of conv_prefill"
    if num_v_heads % num_k_heads:
        raise fail(
            "num_v_heads", "be a multiple of num_k_heads", (num_v_heads, num_k_heads), "check the config"
        )
    check_shape("q", q, (rows, num_k_heads, head_k_dim), remedy)
    check_shape("k", k, (rows, num_k_heads, head_k_dim), remedy)
    check_shape("g", g, (rows, num_v_heads), remedy)
    check_shape("beta", beta, (rows, num_v_heads), remedy)
    check_shape("z", z, (rows, num_v_heads * head_v_dim), "slice the z columns of the projection")
    check_shape("norm_weight", norm_weight, (head_v_dim,), "pass linear_attn.norm.weight")
    check_shape("state", state, (None, num_v_heads, head_v_dim, head_k_dim), "allocate it with StateCache")
    for name, tensor in (("state_index", state_index), ("start", start), ("length", length)):
        check_shape(name, tensor, (1,), "prefill one sequence a call")
    check_last_contiguous("z", z)
    check_dtype("z", z, (torch.float32, torch.bfloat16), "cast the activations")
    for name, tensor in (
        ("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta), ("norm_weight", norm_weight),
        ("state", state),
    ):  # fmt: skip
        check_dtype(name, tensor, (torch.float32,), "keep it in float32")
        if not tensor.is_contiguous():
            raise fail(name, "be contiguous", list(tensor.stride()), "pass a contiguous tensor")
    if gate_activation not in ("silu", "sigmoid"):
        raise fail("gate_activation", "be 'silu' or 'sigmoid'", repr(gate_activation), "map swish to silu")


_OP = register(
    "gdn_prefill", reference.gdn_prefill, _fake, mutates=("state",), launch=_launch, check=_check_gdn_prefill
)


def gdn_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    z: torch.Tensor,
    norm_weight: torch.Tensor,
    state: torch.Tensor,
    state_index: torch.Tensor,
    start: torch.Tensor,
    length: torch.Tensor,
    eps: float,
    gate_activation: str,
) -> torch.Tensor:
    """The gated delta rule over one segment of a prompt, in chunks of 64 from the segment's start.

    q, k [T, nk, dk], v [T, nv, dv], g, beta [T, nv] f32 as conv_prefill returns them; z [T, nv*dv] float32 or
    bfloat16 (row stride free); norm_weight [dv] f32. state [slots, nv, dv, dk] f32, mutated: read at
    state_index[0] unless start is 0 (then the initial state is zero and the slot is not read), written with
    the state after `length` rows. state_index [1] int32; start, length [1] int64; rows >= length are
    padding. Returns y [T, nv*dv] in z's dtype, 0 in padding rows. Raises ValueError for shapes and dtypes
    that do not fit. Source: Gated Delta Networks, arXiv 2412.06464, section 3.3.
    """
    return _OP(q, k, v, g, beta, z, norm_weight, state, state_index, start, length, eps, gate_activation)
