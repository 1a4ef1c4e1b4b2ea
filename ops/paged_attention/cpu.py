"""`paged_attention` on a CPU.

Keys are cut into splits of 64 at absolute positions and every split is computed at full length; scores are
compared by their exact maximum and sums run in split order. Matrix products have 64 columns or 64 terms, and
a multiple of 8 rows. So the bits of a row depend on that row alone (measured: float32 `bmm` gives equal bits
for every batch count, for rows in any place, and for any row count that is a multiple of 8).
"""

from __future__ import annotations

import math
from itertools import accumulate, pairwise

import torch

from compiled_mtp.ops.numerics import sigmoid

SPLIT = 64
_ROW_UNIT = 8
# Bounds the temporaries: floats in the scores of one pass, and in the keys or values gathered at once.
_MAX_SCORES = 1 << 22
_MAX_GATHER = 1 << 21


def paged_attention(
    q: torch.Tensor,
    gate: torch.Tensor,
    kv: torch.Tensor,
    kv_scale: torch.Tensor | None,
    block_table: torch.Tensor,
    positions: torch.Tensor,
    softmax_scale: float,
    first_key: int,
    first_row: torch.Tensor | None = None,
    length: torch.Tensor | None = None,
) -> torch.Tensor:
    if first_row is None or length is None:
        return _attend_windows(q, gate, kv, kv_scale, block_table, positions, softmax_scale, first_key)
    out = q.new_zeros((q.shape[0], q.shape[1] * q.shape[2]))
    for piece, (first, count) in enumerate(zip(first_row.tolist(), length.tolist(), strict=True)):
        if count:
            own, table = slice(first, first + count), block_table[piece : piece + 1]
            rows = (q[own], gate[own], kv, kv_scale, table, positions[own])
            out[own] = _attend_windows(*rows, softmax_scale, first_key)
    return out


def _attend_windows(
    q: torch.Tensor,
    gate: torch.Tensor,
    kv: torch.Tensor,
    kv_scale: torch.Tensor | None,
    block_table: torch.Tensor,
    positions: torch.Tensor,
    softmax_scale: float,
    first_key: int,
) -> torch.Tensor:
    """The operator of as many rows for each request."""
    rows, num_q_heads, hd = q.shape
    num_requests = block_table.shape[0]
    query_len = rows // num_requests
    out = torch.empty((num_requests, query_len, num_q_heads, hd), dtype=q.dtype, device=q.device)
    queries, gates = (t.view(num_requests, query_len, num_q_heads, hd) for t in (q, gate))
    positions = positions.view(num_requests, query_len)
    num_keys = max(SPLIT, min(int(positions.max()) + 1, block_table.shape[1] * kv.shape[3]))
    step = max(1, _MAX_SCORES // (num_requests * num_q_heads * num_keys))
    for first in range(0, query_len, step):
        part = slice(first, first + step)
        result = _attend(
            queries[:, part], kv, kv_scale, block_table, positions[:, part], softmax_scale, first_key
        )
        out[:, part] = result * sigmoid(gates[:, part].float())
    return out.view(rows, num_q_heads * hd)


def _attend(
    q: torch.Tensor,
    kv: torch.Tensor,
    kv_scale: torch.Tensor | None,
    block_table: torch.Tensor,
    positions: torch.Tensor,
    softmax_scale: float,
    first_key: int,
) -> torch.Tensor:
    """Attention of q [B, W, hq, hd] before the gate, float32, all scores of the call held at once."""
    num_requests, query_len, num_q_heads, hd = q.shape
    num_kv_heads, block_size = kv.shape[2], kv.shape[3]
    group = num_q_heads // num_kv_heads
    first_split = first_key // SPLIT
    last_key = positions.amax(1).clamp(max=block_table.shape[1] * block_size - 1)
    num_splits = (last_key // SPLIT + 1 - first_split).clamp(min=0)
    # Longest requests first: the requests that reach split s are then the first `active[s]`.
    order = torch.argsort(num_splits, descending=True, stable=True)
    lengths = num_splits[order].tolist()
    active = [sum(n > s for n in lengths) for s in range(lengths[0])]
    if not active:
        return torch.zeros(q.shape, device=q.device)
    ends = [0, *accumulate(active)]
    # Pairs (split, request) in that order: those of split s are ends[s] .. ends[s + 1] - 1.
    spans = [slice(begin, end) for begin, end in pairwise(ends)]
    request = torch.cat([torch.arange(n, device=q.device) for n in active])
    split = torch.repeat_interleave(torch.tensor(active, device=q.device)) + first_split

    num_rows = -(-query_len * group // _ROW_UNIT) * _ROW_UNIT
    queries = torch.zeros((num_requests, num_kv_heads, num_rows, hd), device=q.device)
    grouped = q[order].view(num_requests, query_len, num_kv_heads, group, hd).transpose(1, 2).float()
    queries[:, :, : query_len * group] = grouped.flatten(2, 3)
    row_position = positions.new_full((num_requests, num_rows), -1)
    row_position[:, : query_len * group] = positions[order].repeat_interleave(group, dim=1)

    keys = split.unsqueeze(1) * SPLIT + torch.arange(SPLIT, device=q.device)  # [pairs, 64]
    blocks = keys // block_size
    is_key = (blocks < block_table.shape[1]) & (keys >= first_key)
    blocks = block_table[order][request.unsqueeze(1), blocks.clamp(max=block_table.shape[1] - 1)].long()
    is_key &= blocks >= 0
    is_seen = is_key.unsqueeze(1) & (keys.unsqueeze(1) <= row_position[request].unsqueeze(2))
    # The longest runs of keys that lie in one block of the cache and in one split.
    run = math.gcd(block_size, SPLIT)
    heads = blocks.clamp(min=0)[:, None, ::run] * (2 * num_kv_heads)
    heads = heads + torch.arange(num_kv_heads, device=q.device)[:, None]
    runs = heads * (block_size // run) + (keys % block_size // run)[:, None, ::run]  # [pairs, hkv, 64 / run]

    splits_at_once = max(1, _MAX_GATHER // (num_requests * num_kv_heads * max(SPLIT, num_rows) * hd))
    parts = [range(s, min(s + splits_at_once, len(active))) for s in range(0, len(active), splits_at_once)]
    scores = queries.new_empty((len(request), num_kv_heads, num_rows, SPLIT))
    for part in parts:
        pairs = slice(ends[part.start], ends[part.stop])
        k, scale = _gather(kv, kv_scale, runs[pairs], run)
        repeated = torch.cat([queries[: active[s]] for s in part])
        score = torch.bmm(repeated.flatten(0, 1), k.flatten(0, 1).transpose(1, 2)).mul_(softmax_scale)
        scores[pairs] = score.view(scores[pairs].shape)
        if scale is not None:
            scores[pairs] *= scale.unsqueeze(2)
    scores.masked_fill_(~is_seen.unsqueeze(1), -torch.inf)

    largest = queries.new_full((*queries.shape[:3], 1), -torch.inf)
    for span, split_largest in zip(spans, scores.amax(-1, keepdim=True).split(active), strict=True):
        reached = largest[: span.stop - span.start]
        torch.maximum(reached, split_largest, out=reached)
    base = torch.where(largest == -torch.inf, 0.0, largest)
    for span in spans:
        scores[span] -= base[: span.stop - span.start]
    weights = scores.exp_()
    total = torch.zeros_like(largest)
    for sums in weights.sum(-1, keepdim=True).split(active):
        total[: len(sums)] += sums
    result = torch.zeros_like(queries)
    for part in parts:
        pairs = slice(ends[part.start], ends[part.stop])
        v, scale = _gather(kv, kv_scale, runs[pairs] + num_kv_heads * (block_size // run), run)
        weight = weights[pairs]
        # The weight of a key that is not seen is 0, but 0 * NaN is not.
        if scale is not None:
            weight = weight * scale.nan_to_num_(0.0, 0.0, 0.0).unsqueeze(2)
        v.nan_to_num_(0.0, 0.0, 0.0)
        sums = torch.bmm(weight.flatten(0, 1), v.flatten(0, 1)).view(len(weight), *queries.shape[1:])
        for split_sums in sums.split([active[s] for s in part]):
            result[: len(split_sums)] += split_sums
    result = torch.where(total == 0.0, 0.0, result / total)[:, :, : query_len * group]
    result = result.view(num_requests, num_kv_heads, query_len, group, hd).transpose(1, 2).reshape(q.shape)
    restored = torch.empty_like(result)
    restored[order] = result
    return restored


def _gather(
    kv: torch.Tensor, kv_scale: torch.Tensor | None, runs: torch.Tensor, run: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Keys or values of n splits as float32 [n, hkv, 64, hd], and their scales [n, hkv, 64].

    runs [n, hkv, 64 / run] numbers runs of `run` tokens in the cache.
    """
    shape, at = (*runs.shape[:2], SPLIT), runs.flatten()
    if kv_scale is None:
        return kv.reshape(-1, run, kv.shape[4]).index_select(0, at).float().view(*shape, -1), None
    stored = kv.reshape(-1, run, kv.shape[4]).view(torch.uint8).index_select(0, at)
    scale = kv_scale.reshape(-1, run).index_select(0, at)
    return stored.view(kv.dtype).float().view(*shape, -1), scale.view(shape)
