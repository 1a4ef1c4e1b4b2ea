"""`gdn_verify` on a CPU: one batched product per token reads the states of all requests once.

The value heads of one key head form one matrix [G, dk], G = nv / nk * dv, so keys and queries are not
repeated; a token's inputs are views that broadcast. Work that does not need the state is done for all tokens
at once.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor

from compiled_mtp.ops.gdn_math import gated_norm

# Bytes of states that are stepped together: more would leave the cache, and every token would reload them.
GROUP_BYTES = 1 << 20
Rings: TypeAlias = tuple[Tensor, Tensor, Tensor]


def _fold(current: Tensor, rings: Rings, slot: int, begin: int, end: int, groups: int) -> None:
    """Advance `current` [nk, groups, dv, dk] in place by the ring entries of positions begin .. end - 1."""
    nk, _, dv, dk = current.shape
    ring_k, ring_u, ring_g = rings
    length = ring_g.shape[2]
    first_k, first_u, first_g = (ring.storage_offset() + slot * ring.stride(0) for ring in rings)
    per_key = groups * length
    for position in range(begin, end):
        at = position % length
        key = ring_k.as_strided((nk, 1, 1, dk), (length * dk, 0, 0, 1), first_k + at * dk)
        update = ring_u.as_strided((nk, groups, dv, 1), (per_key * dv, length * dv, 1, 0), first_u + at * dv)
        decay = ring_g.as_strided((nk, groups, 1, 1), (per_key, length, 0, 0), first_g + at)
        current.mul_(decay).addcmul_(update, key)


def _keep(ring: Tensor, slot: int, start: int, record: Tensor) -> None:
    """Write record [heads, W, ...] into a slot of ring [slots, heads, R, ...] from position `start` on."""
    heads, count, *width = record.shape
    first, strides = start % ring.shape[2], ring.stride()
    offset, fitting = ring.storage_offset() + slot * strides[0], min(count, ring.shape[2] - first)
    own = ring.as_strided((heads, fitting, *width), strides[1:], offset + first * strides[2])
    if fitting == count:
        own.copy_(record)
        return
    own.copy_(record[:, :fitting])
    ring.as_strided((heads, count - fitting, *width), strides[1:], offset).copy_(record[:, fitting:])


def _step(
    inputs: tuple[Tensor, ...],
    out: Tensor,
    state: Tensor,
    rings: Rings,
    slots: list[int],
    cursors: list[tuple[int, int]],
) -> None:
    """Run gdn_verify without its norm for one group of requests; writes out [B*W, nv, dv]."""
    q, k, v, exp_g, beta = inputs
    rows, num_v_heads, dv = v.shape
    nk, dk = k.shape[1:]
    batch, groups = len(slots), num_v_heads // nk
    query_len = rows // batch
    # Fold each request in place, then gather the states of several: each later call covers all of them.
    for slot, (begin, end) in zip(slots, cursors, strict=True):
        if begin < end:
            _fold(state[slot].view(nk, groups, dv, dk), rings, slot, begin, end, groups)
    current = state[slots[0]] if batch == 1 else state[slots]
    if batch == 1 and query_len > 1:
        current = current.clone()
    matrices = current.view(batch * nk, groups * dv, dk).transpose(1, 2)
    heads = current.view(batch, nk, groups, dv, dk)

    # S <- eg S + u k^T is applied after a token's two products with the old S:
    # u = beta (v - eg (S k)),  o = eg (S q) + u (k . q).
    both = torch.stack((k, q), dim=2).view(batch, query_len, nk, 2, dk).transpose(0, 1)
    pairs = both.reshape(query_len, batch * nk, 2, dk)
    products = k.new_empty((query_len, batch * nk, 2, groups * dv))
    readings, outputs = products.view(query_len, batch, nk, 2, groups, dv).unbind(3)
    shape = (batch, query_len, nk, groups)
    keys, values = k.view(batch, query_len, nk, 1, 1, dk), v.view(*shape, dv)
    decays, rates, updates = exp_g.view(*shape, 1), beta.view(*shape, 1), v.new_empty((*shape, dv))
    by_token = (x.unbind(1) for x in (keys, values, decays, rates, updates))
    tokens = zip(pairs.unbind(0), products.unbind(0), readings.unbind(0), *by_token, strict=True)
    for token, (pair, product, reading, key, value, decay, rate, update) in enumerate(tokens):
        torch.bmm(pair, matrices, out=product)
        torch.addcmul(value, decay, reading, value=-1.0, out=update).mul_(rate)
        if token + 1 < query_len:
            heads.mul_(decay.unsqueeze(-1)).addcmul_(update.unsqueeze(-1), key)
    dots = (k * q).sum(-1).view(batch, query_len, nk, 1, 1)
    torch.mul(outputs.transpose(0, 1), decays, out=out.view(*shape, dv)).addcmul_(updates, dots)

    records = (k, updates.view(rows, num_v_heads, dv), exp_g)
    if batch == 1:
        for ring, record in zip(rings, records, strict=True):
            _keep(ring, slots[0], cursors[0][1], record.transpose(0, 1))
        return
    at = torch.tensor([[(end + i) % rings[0].shape[2] for i in range(query_len)] for _, end in cursors])
    for ring, record in zip(rings, records, strict=True):
        ring[torch.tensor(slots)[:, None], :, at] = record.view(batch, query_len, *record.shape[1:])


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
    resident: bool,
    max_unfolded: int,
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
        own = slots[first:last], cursors[first:last]
        kept = [
            slot for slot, (begin, end) in zip(*own, strict=True) if end - begin + query_len <= max_unfolded
        ]
        unfolded = state[kept] if kept else None
        _step(inputs, out[rows], state, rings, *own)
        if unfolded is not None:
            state[kept] = unfolded
    return gated_norm(out, z, norm_weight, eps, gate_activation)
