"""Checks and registration of spec_conv1d and conv_prefill."""

from __future__ import annotations

from typing import Any

import torch

from compiled_mtp.ops.checks import check_contiguous, check_dtype, check_last_contiguous, check_shape, fail
from compiled_mtp.ops.registry import register
from compiled_mtp.ops.spec_conv1d import reference

KERNEL_SIZE = 4
_Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _fake(
    proj: torch.Tensor,
    conv_weight: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    conv_ring: torch.Tensor,
    state_index: torch.Tensor,
    first: torch.Tensor,
    *rest: int | torch.Tensor,
) -> _Outputs:
    num_k_heads, num_v_heads, head_k_dim, head_v_dim = (int(n) for n in rest[-4:])
    rows = proj.shape[0]
    key = (rows, num_k_heads, head_k_dim)
    value = (rows, num_v_heads, head_v_dim)
    gate = (rows, num_v_heads)
    q, k, v, decay, beta = (
        torch.empty(shape, dtype=torch.float32, device=proj.device) for shape in (key, key, value, gate, gate)
    )
    return q, k, v, decay, beta


def _launch_spec_conv1d(*args: Any) -> Any:
    from compiled_mtp.ops.spec_conv1d.kernel import launch_spec_conv1d

    return launch_spec_conv1d(*args)


def _launch_conv_prefill(*args: Any) -> Any:
    from compiled_mtp.ops.spec_conv1d.kernel import launch_conv_prefill

    return launch_conv_prefill(*args)


def _check_spec_conv1d(
    proj: torch.Tensor,
    conv_weight: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    conv_ring: torch.Tensor,
    state_index: torch.Tensor,
    pos: torch.Tensor,
    num_k_heads: int,
    num_v_heads: int,
    head_k_dim: int,
    head_v_dim: int,
) -> None:
    _check(proj, conv_weight, a_log, dt_bias, conv_ring, num_k_heads, num_v_heads, head_k_dim, head_v_dim)
    batch = state_index.shape[0]
    if proj.shape[0] % batch:
        raise fail(
            "proj", "have the same number of rows for each request", (proj.shape[0], batch), "pad windows"
        )
    if proj.shape[0] // batch + KERNEL_SIZE - 1 > conv_ring.shape[1]:
        raise fail(
            "conv_ring", f"hold a window and {KERNEL_SIZE - 1} rows", conv_ring.shape[1], "use a longer ring"
        )


_SPEC_CONV1D = register(
    "spec_conv1d",
    reference.spec_conv1d,
    _fake,
    mutates=("conv_ring",),
    launch=_launch_spec_conv1d,
    check=_check_spec_conv1d,
)


def _check_conv_prefill(
    proj: torch.Tensor,
    conv_weight: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    conv_ring: torch.Tensor,
    state_index: torch.Tensor,
    start: torch.Tensor,
    length: torch.Tensor,
    num_k_heads: int,
    num_v_heads: int,
    head_k_dim: int,
    head_v_dim: int,
) -> None:
    _check(proj, conv_weight, a_log, dt_bias, conv_ring, num_k_heads, num_v_heads, head_k_dim, head_v_dim)
    for name, tensor in (("state_index", state_index), ("start", start), ("length", length)):
        check_shape(name, tensor, (1,), "prefill one sequence a call")
    if conv_ring.shape[1] < KERNEL_SIZE - 1:
        raise fail("conv_ring", f"hold {KERNEL_SIZE - 1} rows", conv_ring.shape[1], "use a longer ring")


_CONV_PREFILL = register(
    "conv_prefill",
    reference.conv_prefill,
    _fake,
    mutates=("conv_ring",),
    launch=_launch_conv_prefill,
    check=_check_conv_prefill,
)


def _check(
    proj: torch.Tensor,
    conv_weight: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    conv_ring: torch.Tensor,
    num_k_heads: int,
    num_v_heads: int,
    head_k_dim: int,
    head_v_dim: int,
) -> None:
    if num_v_heads % num_k_heads:
        raise fail(
            "num_v_heads", "be a multiple of num_k_heads", (num_v_heads, num_k_heads), "check the config"
        )
    channels = 2 * num_k_heads * head_k_dim + num_v_heads * head_v_dim
    columns = channels + num_v_heads * head_v_dim + 2 * num_v_heads
    remedy = "check the head counts and head dims"
    check_shape("proj", proj, (None, None), "flatten requests and window into rows")
    if proj.shape[1] < columns:
        raise fail("proj", f"have at least {columns} columns (q|k|v|z|b|a)", proj.shape[1], remedy)
    check_last_contiguous("proj", proj)
    check_dtype("proj", proj, (torch.float32, torch.bfloat16), "cast the activations")
    check_shape("conv_weight", conv_weight, (channels, KERNEL_SIZE), remedy)
    check_shape("a_log", a_log, (num_v_heads,), remedy)
    check_shape("dt_bias", dt_bias, (num_v_heads,), remedy)
    check_dtype("a_log", a_log, (torch.float32,), "cast it when loading")
    check_dtype("dt_bias", dt_bias, (torch.float32,), "cast it when loading")
    check_shape("conv_ring", conv_ring, (None, None, channels), remedy)
    check_dtype("conv_ring", conv_ring, (proj.dtype,), "store raw inputs in the dtype of proj")
    check_dtype("conv_weight", conv_weight, (proj.dtype,), "cast it when loading")
    tensors = {"conv_weight": conv_weight, "a_log": a_log, "dt_bias": dt_bias, "conv_ring": conv_ring}
    for name, tensor in tensors.items():
        check_contiguous(name, tensor)


def spec_conv1d(
    proj: torch.Tensor,
    conv_weight: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    conv_ring: torch.Tensor,
    state_index: torch.Tensor,
    pos: torch.Tensor,
    num_k_heads: int,
    num_v_heads: int,
    head_k_dim: int,
    head_v_dim: int,
) -> _Outputs:
    """Causal convolution of 4 taps with silu, l2norm of q and k, and gates, over B windows of W rows.

    proj [B*W, P] (row stride free), columns q|k|v|z|b|a and optional padding, float32 or bfloat16;
    conv_weight [C, 4] of the same dtype, oldest tap first; a_log, dt_bias [nv] f32; conv_ring [slots, R, C]
    of proj's dtype, mutated: row b*W+k is written to slot state_index[b] (int32) at position (pos[b] + k)
    mod R, and the three rows before pos[b] (int64) are read from it (zero before position 0). Returns q
    [B*W, nk, dk] (l2norm, times dk^-0.5), k [B*W, nk, dk] (l2norm), v [B*W, nv, dv], exp(g) and beta [B*W,
    nv], all f32, with g = -exp(a_log) softplus(a + dt_bias) and beta = sigmoid(b). Raises ValueError for
    shapes and dtypes that do not fit. Source: Gated Delta Networks, arXiv 2412.06464.
    """
    return _SPEC_CONV1D(
        proj,
        conv_weight,
        a_log,
        dt_bias,
        conv_ring,
        state_index,
        pos,
        num_k_heads,
        num_v_heads,
        head_k_dim,
        head_v_dim,
    )


def conv_prefill(
    proj: torch.Tensor,
    conv_weight: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    conv_ring: torch.Tensor,
    state_index: torch.Tensor,
    start: torch.Tensor,
    length: torch.Tensor,
    num_k_heads: int,
    num_v_heads: int,
    head_k_dim: int,
    head_v_dim: int,
) -> _Outputs:
    """`spec_conv1d` over one segment of a prompt: T rows at positions start.. of which `length` are real.

    Arguments as there, with state_index, start and length of shape [1] (int32, int64, int64). The last three
    real rows are written to conv_ring (mutated); rows that a shorter segment does not reach keep older ones.
    Returns q, k, v, g (the log decay, not its exponential) and beta; padding rows are zero in all five.
    Raises ValueError for shapes and dtypes that do not fit.
    """
    return _CONV_PREFILL(
        proj,
        conv_weight,
        a_log,
        dt_bias,
        conv_ring,
        state_index,
        start,
        length,
        num_k_heads,
        num_v_heads,
        head_k_dim,
        head_v_dim,
    )
