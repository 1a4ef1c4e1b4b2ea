"""`gdn_prefill` on a CPU: cuts each prompt chunk into chunks of 64 rows, as the kernel does."""

from __future__ import annotations

import torch

from compiled_mtp.ops.gdn_math import gated_norm

CHUNK = 64


def _in_chunks(x: torch.Tensor, length: int, chunks: int) -> torch.Tensor:
    """Return the first `length` rows of x [T, heads, ...] as [chunks, heads, CHUNK, ...], zero-padded."""
    out = x.new_zeros((chunks * CHUNK, *x.shape[1:]))
    out[:length] = x[:length]
    return out.view(chunks, CHUNK, *x.shape[1:]).transpose(1, 2).contiguous()


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
    first_row: torch.Tensor,
    eps: float,
    gate_activation: str,
    mark: torch.Tensor | None = None,
) -> torch.Tensor:
    rows, num_v_heads, head_v_dim = v.shape
    y = z.new_zeros((rows, num_v_heads * head_v_dim))
    marks = torch.zeros_like(length) if mark is None else mark
    chunks = zip(*(column.tolist() for column in (state_index, start, length, first_row, marks)), strict=True)
    for slot, begin, used, first, marked in chunks:
        if used:
            own = slice(first, first + used)
            inputs = (q[own], k[own], v[own], g[own], beta[own])
            initial = state[slot] if begin else torch.zeros_like(state[slot])
            marked_state = state[-1] if marked else None
            out, state[slot] = _walk(*inputs, initial, marked // CHUNK, marked_state)
            y[own] = gated_norm(out, z[own], norm_weight, eps, gate_activation)
    return y


def _walk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    current: torch.Tensor,
    marked_chunks: int,
    marked_state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply the rule to one prompt chunk; return its outputs before the norm, and its final state.

    marked_state, if given, receives the state after the first marked_chunks chunks of 64 rows.
    """
    used, num_v_heads, head_v_dim = v.shape
    group = num_v_heads // k.shape[1]
    chunks = -(-used // CHUNK)
    queries = _in_chunks(q, used, chunks).repeat_interleave(group, dim=1)  # [chunks, nv, CHUNK, dk]
    keys = _in_chunks(k, used, chunks).repeat_interleave(group, dim=1)
    values = _in_chunks(v, used, chunks)
    rate = _in_chunks(beta, used, chunks)[..., None]  # [chunks, nv, CHUNK, 1]
    log_decay = _in_chunks(g, used, chunks).cumsum(-1)  # inclusive sum from the chunk's start
    # Above the diagonal the difference is positive and may overflow: mask it before exp.
    difference = log_decay[..., :, None] - log_decay[..., None, :]
    causal = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    decay = torch.exp(difference.masked_fill(~causal, -torch.inf))
    from_start = torch.exp(log_decay)[..., None]
    to_end = torch.exp(log_decay[..., -1:] - log_decay)[..., None]
    # x_i = beta_i (v_i - e^{G_i} S k_i - sum_{j<i} e^{G_i-G_j} (k_i.k_j) x_j): unit lower triangular.
    system = (rate * (keys @ keys.transpose(-1, -2)) * decay).tril(-1)
    scores = (queries @ keys.transpose(-1, -2)) * decay
    right = torch.cat((rate * values, rate * from_start * keys), dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    fixed, reading = solved.split((head_v_dim, k.shape[2]), dim=-1)
    queries = queries * from_start
    keys = keys * to_end
    out = torch.empty_like(values)
    for chunk in range(chunks):
        x = fixed[chunk] - reading[chunk] @ current.transpose(-1, -2)
        out[chunk] = queries[chunk] @ current.transpose(-1, -2) + scores[chunk] @ x
        current = current * from_start[chunk, :, -1:] + x.transpose(-1, -2) @ keys[chunk]
        if marked_state is not None and chunk + 1 == marked_chunks:
            marked_state.copy_(current)
    return out.transpose(1, 2).reshape(chunks * CHUNK, num_v_heads, head_v_dim)[:used], current
