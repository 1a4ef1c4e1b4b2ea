"""The specification of `paged_attention` in plain PyTorch; also what runs on a CPU.

Keys are cut into splits of 64 at absolute positions and every split is computed at full length; scores are
compared by their exact maximum and sums run in split order. Matrix products have 64 columns or 64 terms, and
a multiple of 8 rows. So the bits of a row depend on that row alone (measured: float32 `bmm` gives equal bits
for every batch count, for rows in any place, and for any row count that is a multiple of 8).
"""

from __future__ import annotations

import math
from itertools import accumulate

import torch

from compiled_mtp.ops.numerics import sigmoid

SPLIT = 64
_ROW_UNIT = 8
# Bounds the temporaries: floats in the scores of one pass, and in the keys or values gathered at once.
_MAX_SCORES = 1 << 22
_MAX_GATHER = 1 << 21


def reference(
    q: torch.Tensor,
    gate: torch.Tensor,
    kv: torch.Tensor,
    kv_scale: torch.Tensor | None,
    block_table: torch.Tensor,
    positions: torch.Tensor,
    softmax_scale: float,
    first_key: int,
) -> torch.Tensor:
    """softmax(softmax_scale * q k^T) v * sigmoid(gate) over the keys first_key <= j <= position of each row.

    q, gate [M, hq, hd] float32 or bfloat16 (any strides, the last one 1), rows request-major: request b owns
    rows b*W .. b*W + W-1, W = M // B. kv [num_blocks, 2, hkv, block_size, hd] in the dtype of q, or
    float8_e4m3fn with kv_scale [num_blocks, 2, hkv, block_size] float32. block_table [B, max_blocks] int32,
    -1 where nothing is reserved: such keys are not read. positions [M] int64. Query head h uses kv head
    h // (hq // hkv).
    Returns [M, hq * hd] in the dtype of q; a row with no key gives 0. Keys a row does not see may hold
    anything, NaN included. Nothing is mutated; all arithmetic is float32 with one rounding at the end.
    """
    rows, num_q_heads, hd = q.shape
    num_requests = block_table.shape[0]
    window = rows // num_requests
    out = torch.empty((num_requests, window, num_q_heads, hd), dtype=q.dtype, device=q.device)
    queries, gates = (t.view(num_requests, window, num_q_heads, hd) for t in (q, gate))
    positions = positions.view(num_requests, window)
    num_keys = max(SPLIT, min(int(positions.max()) + 1, block_table.shape[1] * kv.shape[3]))
    step = max(1, _MAX_SCORES // (num_requests * num_q_heads * num_keys))
    for first in range(0, window, step):
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
    num_requests, window, num_q_heads, hd = q.shape
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
    request = torch.cat([torch.arange(n, device=q.device) for n in active])
    split = torch.repeat_interleave(torch.tensor(active, device=q.device))
    ends = [0, *accumulate(active)]

    num_rows = -(-window * group // _ROW_UNIT) * _ROW_UNIT
    splits_at_once = max(1, _MAX_GATHER // (num_requests * num_kv_heads * max(SPLIT, num_rows) * hd))
    groups = [range(s, min(s + splits_at_once, len(active))) for s in range(0, len(active), splits_at_once)]
    queries = torch.zeros((num_requests, num_kv_heads, num_rows, hd), device=q.device)
    grouped = q[order].view(num_requests, window, num_kv_heads, group, hd).transpose(1, 2).float()
    queries[:, :, : window * group] = grouped.flatten(2, 3)
    row_position = positions.new_full((num_requests, num_rows), -1)
    row_position[:, : window * group] = positions[order].repeat_interleave(group, dim=1)

    keys = (split + first_split).unsqueeze(1) * SPLIT + torch.arange(SPLIT, device=q.device)  # [n, 64]
    blocks = keys // block_size
    is_inside = blocks < block_table.shape[1]
    blocks = block_table[order][request.unsqueeze(1), blocks.clamp(max=block_table.shape[1] - 1)].long()
    is_kept = (
        is_inside & (blocks >= 0) & (keys >= first_key) & (keys <= last_key[order][request].unsqueeze(1))
    )
    blocks = blocks.clamp(min=0)

    scores = queries.new_full((len(active), num_requests, num_kv_heads, num_rows, SPLIT), -torch.inf)
    for group_splits in groups:
        part = slice(ends[group_splits.start], ends[group_splits.stop])
        at = request[part]
        k, scale = _gather(kv, kv_scale, 0, blocks[part], keys[part])
        score = torch.bmm(queries[at].flatten(0, 1), k.flatten(0, 1).transpose(1, 2)).mul_(softmax_scale)
        score = score.view(len(at), num_kv_heads, num_rows, SPLIT)
        if scale is not None:
            score = score * scale.unsqueeze(2)
        seen = (keys[part].unsqueeze(1) <= row_position[at].unsqueeze(2)) & is_kept[part].unsqueeze(1)
        scores[split[part], at] = torch.where(seen.unsqueeze(1), score, -torch.inf)

    largest = scores.amax(dim=(0, 4)).unsqueeze(-1)
    weights = scores.sub_(torch.where(largest == -torch.inf, 0.0, largest)).exp_()
    total = torch.zeros_like(largest)
    for sums in weights.sum(-1, keepdim=True):
        total += sums
    result = torch.zeros_like(queries)
    for group_splits in groups:
        part = slice(ends[group_splits.start], ends[group_splits.stop])
        at = request[part]
        v, scale = _gather(kv, kv_scale, 1, blocks[part], keys[part])
        is_value = is_kept[part].unsqueeze(1).unsqueeze(3)
        # 0 * NaN is NaN: what no row has written yet must not reach the sums.
        v = torch.where(is_value & (v.abs() < torch.inf), v, 0.0)
        weight = weights[split[part], at]
        if scale is not None:
            scale = torch.where(is_kept[part].unsqueeze(1) & (scale < torch.inf), scale, 0.0)
            weight = weight * scale.unsqueeze(2)
        partial = torch.bmm(weight.flatten(0, 1), v.flatten(0, 1)).view(len(at), *queries.shape[1:])
        for s in group_splits:
            result[: active[s]] += partial[ends[s] - part.start : ends[s + 1] - part.start]
    result = torch.where(total == 0.0, 0.0, result / total)[:, :, : window * group]
    result = result.view(num_requests, num_kv_heads, window, group, hd).transpose(1, 2).reshape(q.shape)
    restored = torch.empty_like(result)
    restored[order] = result
    return restored


def _gather(
    kv: torch.Tensor, kv_scale: torch.Tensor | None, half: int, blocks: torch.Tensor, keys: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Keys (half 0) or values (half 1) of n splits as float32 [n, hkv, 64, hd]; their scales [n, hkv, 64]."""
    block_size = kv.shape[3]
    # The longest runs that lie in one block of the cache and in one split.
    run = math.gcd(block_size, SPLIT)
    at, begin = blocks[:, ::run], keys[:, ::run] % block_size // run

    def take(cache: torch.Tensor) -> torch.Tensor:
        runs = cache.view(*cache.shape[:3], block_size // run, run, *cache.shape[4:])
        runs = runs[at, half, :, begin]  # [n, 64 / run, hkv, run, ...]
        return runs.transpose(1, 2).flatten(2, 3)

    if kv_scale is None:
        return take(kv).float(), None
    return take(kv.view(torch.uint8)).view(kv.dtype).float(), take(kv_scale)
