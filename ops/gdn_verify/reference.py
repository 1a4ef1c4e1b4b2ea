"""The specification of `gdn_verify`."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from compiled_mtp.ops.checks import fail
from compiled_mtp.ops.gdn_math import apply_record, check_gdn_heads, gated_norm
from compiled_mtp.ops.registry import Launch, operator
from compiled_mtp.ops.signature import ACTIVATION, CONTIGUOUS, F32, I32, I64, Like, Remedy

_OUTPUTS = Remedy("pass the outputs of spec_conv1d")
_CACHE = Remedy("allocate it with StateCache")
_CURSOR = Remedy("pass one cursor a request")


def _windows_fit(
    rows: int, B: int, R: int, Hk: int, Hv: int, gate_activation: str, max_unfolded: int
) -> None:
    check_gdn_heads(Hk, Hv, gate_activation)
    if B == 0 or rows % B:
        raise fail("v", "have the same number of rows for each request", (rows, B), "pad windows")
    if 2 * (rows // B) > R:
        raise fail("ring length", f"be at least 2*W = {2 * (rows // B)}", R, "use a longer ring")
    if not 0 <= max_unfolded <= R // 2:
        raise fail("max_unfolded", f"be 0 to {R // 2}, half of the ring", max_unfolded, "use a longer ring")


# States, rings and cursors are written by this layer's call in the step before, by a prefill, or at a step's
# end. A fence separates those writers from this call: in_proj (the embedding where in_proj's weight is
# resident) and the head of the step before. z is not read early: in_proj writes it, and only spec_conv1d, no
# fence, lies between. The norm is a fence because calls of gdn_verify may follow one another directly;
# `resident` excludes that.
VERIFY = Launch(
    "gdn_verify_kernel",
    reads_early=("state", "ring_k", "ring_u", "ring_g", "state_index", "base", "pos"),
    stores_early=("state",),
)
MANY = Launch("gdn_many_kernel", reads_early=("state", "state_index"))


@operator(
    mutates=("state", "ring_k", "ring_u", "ring_g"),
    launches=(VERIFY, MANY, Launch("gated_norm_kernel", reads_early=("norm_weight",), is_fence=True)),
    resident_launches=(VERIFY, MANY, Launch("gated_norm_kernel", reads_early=("norm_weight",))),
    check=_windows_fit,
    has_cpu_route=True,
)
def gdn_verify(
    q: Annotated[Tensor, "rows Hk Dk", F32, CONTIGUOUS, _OUTPUTS],
    k: Annotated[Tensor, "rows Hk Dk", F32, CONTIGUOUS, _OUTPUTS],
    v: Annotated[Tensor, "rows Hv Dv", F32, CONTIGUOUS, _OUTPUTS],
    exp_g: Annotated[Tensor, "rows Hv", F32, CONTIGUOUS, _OUTPUTS],
    beta: Annotated[Tensor, "rows Hv", F32, CONTIGUOUS, _OUTPUTS],
    z: Annotated[Tensor, "rows Hv*Dv", ACTIVATION, Remedy("slice the z columns of the projection")],
    norm_weight: Annotated[Tensor, "Dv", F32, CONTIGUOUS, Remedy("pass linear_attn.norm.weight")],
    state: Annotated[Tensor, "slots Hv Dv Dk", F32, CONTIGUOUS, _CACHE],
    ring_k: Annotated[Tensor, "slots Hk R Dk", F32, CONTIGUOUS, _CACHE],
    ring_u: Annotated[Tensor, "slots Hv R Dv", F32, CONTIGUOUS, _CACHE],
    ring_g: Annotated[Tensor, "slots Hv R", F32, CONTIGUOUS, _CACHE],
    state_index: Annotated[Tensor, "B", I32],
    base: Annotated[Tensor, "B", I64, _CURSOR],
    pos: Annotated[Tensor, "B", I64, _CURSOR],
    eps: float,
    gate_activation: str,
    resident: bool = False,
    max_unfolded: int = 0,
) -> Annotated[Tensor, "rows Hv*Dv", Like("z")]:
    """Fold the ring entries of positions [base, pos) into the state and step over B windows of W tokens.

    The folded state is stored, unless pos - base + W is at most max_unfolded: `accept_window` then leaves
    base as it is. max_unfolded is at most half of the ring.

    q (l2norm, scaled), k (l2norm) [B*W, nk, dk], v [B*W, nv, dv], exp_g, beta [B*W, nv]; z [B*W, nv*dv] (any
    row stride); norm_weight [dv], used without adding 1. Mutates state [slots, nv, dv, dk], ring_k [slots,
    nk, R, dk], ring_u [slots, nv, R, dv] and ring_g [slots, nv, R] (exp(g)): token t of the window writes
    ring entry (pos + t) mod R, which a later call folds. gate_activation is "silu" or "sigmoid".
    Per token: S <- exp(g) S; u = beta (v - S k); S <- S + u k^T; o = S q; y = rmsnorm(o, eps) norm_weight
    act(z). Value head j uses key head j // (nv / nk). A window of W tokens has the bits of W windows of one
    token. resident: the product that follows may have a resident weight (`linear`); another gdn_verify must
    then not follow directly. Returns y [B*W, nv*dv] in z's dtype.
    Source: Gated Delta Networks, arXiv 2412.06464.
    """
    group, ring = v.shape[1] // k.shape[1], ring_k.shape[2]
    batch = state_index.shape[0]
    query_len = v.shape[0] // batch
    out = torch.empty_like(v)
    for request, slot in enumerate(state_index.tolist()):
        folded, first = int(base[request]), int(pos[request])
        current = state[slot].clone()
        for at in (position % ring for position in range(folded, first)):
            key = ring_k[slot, :, at].repeat_interleave(group, 0)
            apply_record(current, key, ring_u[slot, :, at], ring_g[slot, :, at])
        if first - folded + query_len > max_unfolded:
            state[slot] = current
        for token in range(query_len):
            row, at = request * query_len + token, (first + token) % ring
            key, query = (x[row].repeat_interleave(group, 0) for x in (k, q))  # [nv, dk]
            read = exp_g[row, :, None] * torch.einsum("hvk,hk->hv", current, key)
            update = beta[row, :, None] * (v[row] - read)
            apply_record(current, key, update, exp_g[row])
            out[row] = torch.einsum("hvk,hk->hv", current, query)
            ring_k[slot, :, at], ring_u[slot, :, at], ring_g[slot, :, at] = k[row], update, exp_g[row]
    return gated_norm(out, z, norm_weight, eps, gate_activation)
