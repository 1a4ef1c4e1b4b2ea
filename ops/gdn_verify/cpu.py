"""`gdn_verify` on a CPU: one product a token for the states of all requests, read once.

A key head's value heads are the rows of one matrix [G, dk], G = nv / nk * dv, so that nothing is repeated; a
token of a few numbers is a view, and what is done to it broadcasts.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from compiled_mtp.ops.gdn_math import gated_norm

# States stepped together take about this much: with more, every token reads them from memory again.
GROUP_BYTES = 1 << 20


def _by_token(x: Tensor, batch: int, *shape: int) -> tuple[Tensor, ...]:
    """The tokens of x [B*W, ...], each [B * shape[0], *shape[1:]]."""
    if batch > 1:
        x = x.view(batch, -1, *x.shape[1:]).transpose(0, 1)
    return x.reshape(-1, batch * shape[0], *shape[1:]).unbind(0)


def _fold(
    current: Tensor, rings: tuple[Tensor, Tensor, Tensor], slot: int, begin: int, end: int, groups: int
) -> None:
    """Advance `current` [nk, groups, dv, dk] in place by the records of positions begin .. end - 1."""
    (nk, _, dv, dk), count = current.shape, end - begin
    at = torch.arange(begin, end) % rings[0].shape[2]
    k, u, exp_g = (ring[slot].index_select(1, at) for ring in rings)
    records = zip(
        k.view(nk, 1, count, 1, dk).unbind(2),
        u.view(nk, groups, count, dv, 1).unbind(2),
        exp_g.view(nk, groups, count, 1, 1).unbind(2),
        strict=True,
    )
    for key, update, decay in records:
        current.mul_(decay).addcmul_(update, key)


def _step(
    inputs: tuple[Tensor, ...],
    out: Tensor,
    state: Tensor,
    rings: tuple[Tensor, Tensor, Tensor],
    slots: list[int],
    cursors: list[tuple[int, int]],
) -> None:
    """gdn_verify without its norm, for few requests: writes out [B*W, nv, dv]."""
    q, k, v, exp_g, beta = inputs
    rows, num_v_heads, dv = v.shape
    nk, dk = k.shape[1:]
    batch, groups = len(slots), num_v_heads // nk
    query_len = rows // batch
    # Every request folds in place; several are then gathered, so that later calls are one for all of them.
    for slot, (begin, end) in zip(slots, cursors, strict=True):
        if begin < end:
            _fold(state[slot].view(nk, groups, dv, dk), rings, slot, begin, end, groups)
    current = state[slots[0]] if batch == 1 else state[slots]
    if batch == 1 and query_len > 1:
        current = current.clone()
    matrices = current.view(batch * nk, groups * dv, dk).transpose(1, 2)
    heads = current.view(batch * nk, groups, dv, dk)

    # S <- eg S + u k^T is applied after a token's two products with the old S:
    # u = beta v - beta eg (S k),  o = eg (S q) + u (k . q).
    pairs = _by_token(torch.stack((k, q), dim=2), batch, nk, 2, dk)
    decay, rate = exp_g.unsqueeze(-1), beta.unsqueeze(-1)
    rates = _by_token(torch.mul(rate, decay).neg_(), batch, nk, groups, 1)
    decays = _by_token(decay, batch, nk, groups, 1)
    values = _by_token(rate * v, batch, nk, groups, dv)
    dots = _by_token((k * q).sum(-1, keepdim=True), batch, nk, 1, 1)
    updates, results = [], []
    for token, both in enumerate(pairs):
        product = torch.bmm(both, matrices).view(-1, 2, groups, dv)
        update = torch.addcmul(values[token], rates[token], product[:, 0])
        results.append((product[:, 1] * decays[token]).addcmul_(update, dots[token]))
        updates.append(update)
        if token + 1 < query_len:
            heads.mul_(decays[token].unsqueeze(-1)).addcmul_(update.unsqueeze(-1), both[:, None, :1])
    by_request = torch.stack(updates).view(query_len, batch, num_v_heads, dv).transpose(0, 1)
    outputs = torch.stack(results).view(query_len, batch, num_v_heads, dv).transpose(0, 1)
    out.view(batch, query_len, num_v_heads, dv).copy_(outputs)

    at = torch.tensor([[(end + i) % rings[0].shape[2] for i in range(query_len)] for _, end in cursors])
    records = (k.view(batch, query_len, nk, dk), by_request, exp_g.view(batch, query_len, num_v_heads))
    for ring, record in zip(rings, records, strict=True):
        if batch == 1:
            ring[slots[0]].index_copy_(1, at[0], record[0].transpose(0, 1))
        else:
            ring[torch.tensor(slots)[:, None], :, at] = record


def gdn_verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    exp_g: Tensor,
    beta: Tensor,
    z: Tensor,
    norm_weight: Tensor,
    state: Tensor,
    ring_k: Tensor,
    ring_u: Tensor,
    ring_g: Tensor,
    state_index: Tensor,
    base: Tensor,
    pos: Tensor,
    eps: float,
    gate_activation: str,
) -> Tensor:
    slots, cursors = state_index.tolist(), list(zip(base.tolist(), pos.tolist(), strict=True))
    batch, rings = len(slots), (ring_k, ring_u, ring_g)
    query_len = v.shape[0] // batch
    out = torch.empty_like(v)
    request_bytes = state.stride(0) * state.element_size()
    group = batch if batch * request_bytes <= 2 * GROUP_BYTES else max(1, GROUP_BYTES // request_bytes)
    for first, last in pairwise([*range(0, batch, group), batch]):
        rows = slice(first * query_len, last * query_len)
        inputs = tuple(x[rows] for x in (q, k, v, exp_g, beta)) if group < batch else (q, k, v, exp_g, beta)
        _step(inputs, out[rows], state, rings, slots[first:last], cursors[first:last])
    return gated_norm(out, z, norm_weight, eps, gate_activation)
