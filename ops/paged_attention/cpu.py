"""`paged_attention` on a CPU, a request at a time.

Keys are cut into splits of 64 at absolute positions and every split is computed at full length; scores are
compared by their exact maximum and sums run in split order. Matrix products have 64 columns or 64 terms, and
a multiple of 8 rows. So the bits of a row depend on that row alone (measured: float32 `bmm` gives equal bits
for every batch count, for rows in any place, and for any row count that is a multiple of 8).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_mtp.ops.numerics import sigmoid

SPLIT = 64
_ROW_UNIT = 8
# Bounds the temporaries: floats in the scores of one pass, and in the keys or values gathered at once.
_MAX_SCORES = 1 << 22
_MAX_GATHER = 1 << 21
# Below every score; the difference of minus infinity and this is minus infinity.
_LOWEST = torch.finfo(torch.float32).min


def paged_attention(
    q: Tensor,
    gate: Tensor,
    kv: Tensor,
    kv_scale: Tensor | None,
    block_table: Tensor,
    positions: Tensor,
    softmax_scale: float,
    first_key: int,
    first_row: Tensor | None = None,
    length: Tensor | None = None,
) -> Tensor:
    rows, num_q_heads, _ = q.shape
    max_keys, lasts = block_table.shape[1] * kv.shape[3], positions.tolist()
    if first_row is None or length is None:
        query_len = rows // block_table.shape[0]
        spans = [(first, query_len) for first in range(0, rows, query_len)]
    else:
        spans = list(zip(first_row.tolist(), length.tolist(), strict=True))
    # Rows of nobody may hold anything.
    is_full = sum(count for _, count in spans) == rows
    out = (torch.empty if is_full else torch.zeros)(q.shape, dtype=torch.float32)
    for (begin, count), table in zip(spans, block_table, strict=True):
        if not count:
            continue
        num_keys = min(max(lasts[begin : begin + count]) + 1, max_keys)
        step = max(1, _MAX_SCORES // (num_q_heads * max(SPLIT, num_keys)))
        for first in range(begin, begin + count, step):
            part = slice(first, min(first + step, begin + count))
            end = min(max(lasts[part]) + 1, max_keys)
            place = (kv, kv_scale, table, positions[part], end, first_key)
            attended = _attend(q[part] * softmax_scale, *place)
            torch.mul(attended, sigmoid(gate[part].float()), out=out[part])
    return out.flatten(1).to(q.dtype)


def _attend(
    q: Tensor,
    kv: Tensor,
    kv_scale: Tensor | None,
    table: Tensor,
    positions: Tensor,
    end: int,
    first_key: int,
) -> Tensor:
    """Attention of one request's scaled q [W, hq, hd], before the gate, to keys below `end`; float32."""
    query_len, num_q_heads, hd = q.shape
    num_kv_heads, group = kv.shape[2], num_q_heads // kv.shape[2]
    begin = first_key // SPLIT * SPLIT
    splits = -(-(end - begin) // SPLIT)
    if splits <= 0:
        return torch.zeros(q.shape, dtype=torch.float32)
    used_rows = query_len * group
    padding = -used_rows % _ROW_UNIT
    queries = q.float().view(query_len, num_kv_heads, group, hd).transpose(0, 1).reshape(-1, used_rows, hd)
    queries = F.pad(queries, (0, 0, 0, padding))
    runs, is_missing, run = _find_runs(table, kv.shape, begin, splits)
    own = positions if group == 1 else positions.repeat_interleave(group)
    keys = torch.arange(begin, begin + splits * SPLIT)
    is_unseen = keys > F.pad(own, (0, padding), value=-1)[:, None]
    if begin < first_key:
        is_unseen |= keys < first_key
    if is_missing is not None:
        is_unseen |= is_missing

    size = max(1, _MAX_GATHER // (num_kv_heads * max(SPLIT, used_rows + padding) * hd))
    scores = []
    for part in runs.split(size):
        k, scale = _gather(kv, kv_scale, part, run)
        repeated = queries.expand(len(part), -1, -1, -1).reshape(-1, *queries.shape[1:])
        score = torch.bmm(repeated, k.flatten(0, 1).transpose(1, 2)).view(len(part), num_kv_heads, -1, SPLIT)
        scores.append(score if scale is None else score.mul_(scale.unsqueeze(2)))
    weights = scores[0] if len(scores) == 1 else torch.cat(scores)
    weights.masked_fill_(is_unseen.view(-1, 1, splits, SPLIT).permute(2, 1, 0, 3), -torch.inf)
    weights.sub_(weights.amax((0, 3), keepdim=True).clamp_(min=_LOWEST)).exp_()
    # A row that sees a key has a sum of 1 at least, any other of 0.
    total = _add(weights.sum(-1, keepdim=True)).clamp_(min=1.0)
    sums = []
    for part, weight in zip(runs.split(size), weights.split(size), strict=True):
        v, scale = _gather(kv, kv_scale, part + num_kv_heads * (kv.shape[3] // run), run)
        # The weight of a key that is not seen is 0, but 0 * NaN is not.
        if scale is not None:
            weight = weight * scale.nan_to_num_(0.0, 0.0, 0.0).unsqueeze(2)
        v.nan_to_num_(0.0, 0.0, 0.0)
        product = torch.bmm(weight.flatten(0, 1), v.flatten(0, 1))
        sums.append(product.view(len(part), *queries.shape))
    result = _add(sums[0] if len(sums) == 1 else torch.cat(sums)).div_(total)[:, :used_rows]
    return result.view(num_kv_heads, query_len, group, hd).transpose(0, 1).reshape(q.shape)


def _add(parts: Tensor) -> Tensor:
    """The sum of parts [n, ...] in their order; mutates the first."""
    first, *rest = parts.unbind(0)
    for part in rest:
        first.add_(part)
    return first


def _find_runs(
    table: Tensor, kv_shape: torch.Size, begin: int, splits: int
) -> tuple[Tensor, Tensor | None, int]:
    """Where the keys of splits from position `begin` on lie in the cache.

    Returns the numbers [splits, hkv, 64 / run] of runs of `run` keys, which keys [splits * 64] are none, or
    None, and run: the most keys that lie in one block and in one split.
    """
    num_kv_heads, block_size = kv_shape[2], kv_shape[3]
    run = math.gcd(block_size, SPLIT)
    runs_a_block, end = block_size // run, begin + splits * SPLIT
    first_keys = torch.arange(begin, end, run)
    blocks = first_keys // block_size
    is_short = end > len(table) * block_size
    at = table[blocks.clamp(max=len(table) - 1) if is_short else blocks].long()
    is_missing = None
    if is_short or int(at.min()) < 0:
        is_missing = ((at < 0) | (blocks >= len(table))).repeat_interleave(run)
        at = at.clamp(min=0)
    runs = (at * (2 * num_kv_heads * runs_a_block)).add_(first_keys % block_size // run)
    heads = torch.arange(0, num_kv_heads * runs_a_block, runs_a_block)
    return runs.view(splits, 1, -1) + heads[:, None], is_missing, run


def _gather(kv: Tensor, kv_scale: Tensor | None, runs: Tensor, run: int) -> tuple[Tensor, Tensor | None]:
    """Keys or values of n splits as float32 [n, hkv, 64, hd], and their scales [n, hkv, 64].

    runs [n, hkv, 64 / run] numbers runs of `run` tokens in the cache.
    """
    shape, at = (*runs.shape[:2], SPLIT), runs.flatten()
    if kv_scale is None:
        return kv.reshape(-1, run, kv.shape[4]).index_select(0, at).float().view(*shape, -1), None
    stored = kv.reshape(-1, run, kv.shape[4]).view(torch.uint8).index_select(0, at)
    scale = kv_scale.reshape(-1, run).index_select(0, at)
    return stored.view(kv.dtype).float().view(*shape, -1), scale.view(shape)
