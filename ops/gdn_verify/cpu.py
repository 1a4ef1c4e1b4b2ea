"""`gdn_verify` on a CPU: one product a token for the states of all requests, read once."""

from __future__ import annotations

import torch

from compiled_mtp.ops.gdn_math import apply_record, fold_records, gated_norm

# States stepped together take about this much: with more, every token reads them from memory again.
GROUP_BYTES = 1 << 20


def _by_token(x: torch.Tensor, batch: int, heads: int) -> torch.Tensor:
    """x [B*W, heads', ...] as [W, B*heads, ...], a key head repeated for the value heads that use it."""
    if batch == 1 and x.shape[1] == heads:
        return x
    x = x.view(batch, x.shape[0] // batch, x.shape[1], 1, *x.shape[2:])
    x = x.expand(-1, -1, -1, heads // x.shape[2], *x.shape[4:]).transpose(0, 1)
    return x.reshape(x.shape[0], batch * heads, *x.shape[4:])


def _step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    exp_g: torch.Tensor,
    beta: torch.Tensor,
    out: torch.Tensor,
    state: torch.Tensor,
    ring_k: torch.Tensor,
    ring_u: torch.Tensor,
    ring_g: torch.Tensor,
    state_index: torch.Tensor,
    base: torch.Tensor,
    pos: torch.Tensor,
) -> None:
    """gdn_verify without its norm, for few requests: writes out [B*W, nv, dv]."""
    rows, num_v_heads, head_v_dim = v.shape
    num_k_heads, head_k_dim = k.shape[1:]
    batch = state_index.shape[0]
    query_len = rows // batch
    slots = state_index.long()

    # One request folds in place; several are gathered, so that every later call is one for all of them.
    if batch == 1:
        current = state[int(slots[0])][None]
    else:
        current = state[slots]
    has_folded = fold_records(current, ring_k, ring_u, ring_g, state_index, base, pos)
    if batch > 1 and has_folded:
        folded = (pos > base).nonzero()[:, 0]
        state[slots[folded]] = current[folded]
    elif batch == 1 and query_len > 1:
        current = current.clone()
    current = current.view(batch * num_v_heads, head_v_dim, head_k_dim)

    # S <- eg S + u k^T is applied after a token's two products with the old S:
    # u = beta v - beta eg (S k),  o = eg (S q) + u (k . q).
    key_query = _by_token(torch.stack((k, q), dim=2), batch, num_v_heads)  # [W, B*nv, 2, dk]
    key = key_query[:, :, 0]
    decay = _by_token(exp_g, batch, num_v_heads)[..., None]
    rate = _by_token(beta, batch, num_v_heads)[..., None]
    scaled_value = rate * _by_token(v, batch, num_v_heads)
    scaled_rate = -rate * decay
    matrices = current.transpose(1, 2)
    products = torch.empty(query_len, batch * num_v_heads, 2, head_v_dim, device=v.device)
    update = torch.empty_like(scaled_value)
    for token in range(query_len):
        torch.bmm(key_query[token], matrices, out=products[token])
        torch.addcmul(scaled_value[token], scaled_rate[token], products[token, :, 0], out=update[token])
        if token + 1 < query_len:
            apply_record(current, key[token], update[token], decay[token, :, 0])
    key_dot_query = (key * key_query[:, :, 1]).sum(-1, keepdim=True)
    result = products[:, :, 1] * decay + update * key_dot_query
    out.view(batch, query_len, num_v_heads, head_v_dim).copy_(
        result.view(query_len, batch, num_v_heads, head_v_dim).transpose(0, 1)
    )

    ring_rows = (pos[:, None] + torch.arange(query_len, device=pos.device)) % ring_k.shape[2]
    places = (slots[:, None], slice(None), ring_rows)
    ring_k[places] = k.view(batch, query_len, num_k_heads, head_k_dim)
    ring_u[places] = update.view(query_len, batch, num_v_heads, head_v_dim).transpose(0, 1)
    ring_g[places] = exp_g.view(batch, query_len, num_v_heads)


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
    batch = state_index.shape[0]
    query_len = v.shape[0] // batch
    out = torch.empty_like(v)
    request_bytes = state[0].numel() * state.element_size()
    group = batch if batch * request_bytes <= 2 * GROUP_BYTES else max(1, GROUP_BYTES // request_bytes)
    for first in range(0, batch, group):
        requests = slice(first, first + group)
        rows = slice(first * query_len, (first + group) * query_len)
        _step(
            q[rows], k[rows], v[rows], exp_g[rows], beta[rows], out[rows], state, ring_k, ring_u, ring_g,
            state_index[requests], base[requests], pos[requests],
        )  # fmt: skip
    return gated_norm(out, z, norm_weight, eps, gate_activation)
