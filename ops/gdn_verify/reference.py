"""What gdn_verify computes."""

from __future__ import annotations

import torch

from compiled_mtp.ops.gdn_math import apply_record, fold_records, gated_norm


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
    rows, num_v_heads, head_v_dim = v.shape
    num_k_heads, head_k_dim = k.shape[1:]
    batch = state_index.shape[0]
    query_len = rows // batch
    group = num_v_heads // num_k_heads
    slots = state_index.long()

    # One request folds in place; several are gathered, so that every later call is one for all of them.
    if batch == 1:
        current = state[int(slots[0]) : int(slots[0]) + 1]
    else:
        current = state[slots]
    fold_records(current, ring_k, ring_u, ring_g, state_index, base, pos)
    if batch > 1:
        folded = (pos > base).nonzero()[:, 0]
        state[slots[folded]] = current[folded]
    elif query_len > 1:
        current = current.clone()

    key_query = torch.stack((k, q), dim=2).repeat_interleave(group, dim=1)
    key_query = key_query.view(batch, query_len, num_v_heads, 2, head_k_dim)
    key_dot_query = (q * k).sum(-1).repeat_interleave(group, dim=1).view(batch, query_len, num_v_heads, 1)
    value = v.view(batch, query_len, num_v_heads, head_v_dim)
    decay = exp_g.view(batch, query_len, num_v_heads, 1)
    rate = beta.view(batch, query_len, num_v_heads, 1)
    out = torch.empty_like(value)
    update = torch.empty_like(value)
    matrices = current.view(batch * num_v_heads, head_v_dim, head_k_dim).transpose(1, 2)
    for token in range(query_len):
        vectors = key_query[:, token].reshape(batch * num_v_heads, 2, head_k_dim)
        read = torch.bmm(vectors, matrices).view(batch, num_v_heads, 2, head_v_dim)
        read = read * decay[:, token, :, None]
        u = rate[:, token] * (value[:, token] - read[:, :, 0])
        out[:, token] = read[:, :, 1] + u * key_dot_query[:, token]
        update[:, token] = u
        if token + 1 < query_len:
            apply_record(current, key_query[:, token, :, 0], u, decay[:, token, :, 0])

    ring_rows = (pos[:, None] + torch.arange(query_len, device=pos.device)) % ring_k.shape[2]
    ring_k[slots[:, None], :, ring_rows] = k.view(batch, query_len, num_k_heads, head_k_dim)
    ring_u[slots[:, None], :, ring_rows] = update
    ring_g[slots[:, None], :, ring_rows] = decay[..., 0]

    return gated_norm(out.view(rows, num_v_heads, head_v_dim), z, norm_weight, eps, gate_activation)
