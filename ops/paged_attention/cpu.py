"""`paged_attention` on a CPU, one request at a time.

Keys are cut into splits of 64 at absolute positions, and every split is computed at full length. The softmax
subtracts the exact maximum, and sums run in split order. Matrix products have 64 columns or 64 terms, and a
multiple of 8 rows. The bits of a row therefore depend on that row alone (measured: float32 `bmm` gives equal
bits for every batch count, for rows in any place, and for any row count that is a multiple of 8).
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_mtp.ops.numerics import number, sigmoid

SPLIT = 64
_ROW_UNIT = 8
# Bounds the temporaries: floats in the scores of one pass, and in the keys or values gathered at once.
_MAX_SCORES = 1 << 22
_MAX_GATHER = 1 << 21
# Stands for a maximum of minus infinity: subtracting it from minus infinity gives minus infinity, not NaN.
_LOWEST = torch.finfo(torch.float32).min
# Masks of at most this number of rows, those of a round, are cached: all layers of a model use them.
_FEW_ROWS = 32


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
    # Rows outside all requests must give 0.
    is_full = sum(count for _, count in spans) == rows
    out = (torch.empty if is_full else torch.zeros)(q.shape, dtype=torch.float32)
    for (begin, count), table in zip(spans, block_table, strict=True):
        if not count:
            continue
        num_keys = min(max(lasts[begin : begin + count]) + 1, max_keys)
        step = max(1, _MAX_SCORES // (num_q_heads * max(SPLIT, num_keys)))
        for first in range(begin, begin + count, step):
            partial = slice(first, min(first + step, begin + count))
            own = lasts[partial]
            end = min(max(own) + 1, max_keys)
            attended = _attend(q[partial].float(), softmax_scale, kv, kv_scale, table, own, end, first_key)
            torch.mul(attended, sigmoid(gate[partial].float()), out=out[partial])
    return out.flatten(1).to(q.dtype)


def _attend(
    q: Tensor,
    softmax_scale: float,
    kv: Tensor,
    kv_scale: Tensor | None,
    table: Tensor,
    positions: list[int],
    end: int,
    first_key: int,
) -> Tensor:
    """Return the attention of one request's q [W, hq, hd] float32 to keys below `end`, before the gate."""
    query_len, num_q_heads, hd = q.shape
    num_kv_heads, group = kv.shape[2], num_q_heads // kv.shape[2]
    begin = first_key // SPLIT * SPLIT
    splits = -(-(end - begin) // SPLIT)
    if splits <= 0:
        return torch.zeros_like(q)
    used_rows = query_len * group
    queries = q.new_zeros((num_kv_heads, used_rows + -used_rows % _ROW_UNIT, hd))
    own = queries[:, :used_rows].view(num_kv_heads, query_len, group, hd)
    torch.mul(q.view(query_len, num_kv_heads, group, hd).transpose(0, 1), number(softmax_scale), out=own)

    keys = _find_keys(table, kv, begin, splits)
    pages = _Pages(kv, kv_scale, keys.run)
    size = max(1, _MAX_GATHER // (num_kv_heads * max(SPLIT, queries.shape[1]) * hd))
    partials = (keys.runs,) if splits <= size else keys.runs.split(size, dim=1)
    # Gather keys and values in one call if they fit.
    both = pages.read(partials[0]) if len(partials) == 1 else None
    scores = []
    for partial in partials:
        k, scale = pages.read(partial[0]) if both is None else both.half(0)
        count = partial.shape[1]
        repeated = queries.expand(count, -1, -1, -1).reshape(-1, *queries.shape[1:])
        score = torch.bmm(repeated, k.flatten(0, 1).transpose(1, 2)).view(count, num_kv_heads, -1, SPLIT)
        scores.append(score if scale is None else score.mul_(scale.unsqueeze(2)))
    weights = scores[0] if len(scores) == 1 else torch.cat(scores)
    _hide(weights, keys.is_missing, positions, group, begin, first_key)
    weights.sub_(weights.amax((0, 3), keepdim=True).clamp_(min=_LOWEST)).exp_()
    # The total of a row that sees a key is at least 1; that of any other row is 0.
    total = _add(weights.sum(-1, keepdim=True)).clamp_(min=1.0)
    sums = []
    for partial, weight in zip(
        partials, (weights,) if len(partials) == 1 else weights.split(size), strict=True
    ):
        v, scale = pages.read(partial[1]) if both is None else both.half(1)
        # An unseen key has weight 0, but 0 * NaN is NaN.
        if scale is not None:
            weight = weight * scale.nan_to_num_(0.0, 0.0, 0.0).unsqueeze(2)
        v.nan_to_num_(0.0, 0.0, 0.0)
        product = torch.bmm(weight.flatten(0, 1), v.flatten(0, 1))
        sums.append(product.view(-1, *queries.shape))
    result = _add(sums[0] if len(sums) == 1 else torch.cat(sums)).div_(total)[:, :used_rows]
    return result.view(num_kv_heads, query_len, group, hd).transpose(0, 1).reshape(q.shape)


def _add(partials: Tensor) -> Tensor:
    """Return the sum of partials [n, ...], added in order; mutates the first."""
    first, *rest = partials.unbind(0)
    for partial in rest:
        first.add_(partial)
    return first


def _hide(
    weights: Tensor,
    is_missing: Tensor | None,
    positions: list[int],
    group: int,
    begin: int,
    first_key: int,
) -> None:
    """Write minus infinity to weights [splits, hkv, rows, 64] at keys that a row does not see.

    begin: position of the first key. Rows after those of `positions` are padding and keep their weights.
    """
    splits, num_kv_heads, _, _ = weights.shape
    # Every row sees all keys of the splits before `first`.
    first = min(splits, max(0, min(positions) + 1 - begin) // SPLIT)
    if first < splits:
        relative = tuple([position - begin - first * SPLIT for position in positions])
        find = _unseen if len(relative) <= _FEW_ROWS else _unseen.__wrapped__
        partly = weights[first:, :, : len(relative) * group]
        by_row = partly.view(splits - first, num_kv_heads, len(relative), group, SPLIT)
        by_row.masked_fill_(find(relative, splits - first), -torch.inf)
    if begin < first_key:
        weights[0, :, :, : first_key - begin] = -torch.inf
    if is_missing is not None:
        weights.masked_fill_(is_missing.view(splits, 1, 1, SPLIT), -torch.inf)


@functools.lru_cache(maxsize=256)
def _unseen(positions: tuple[int, ...], splits: int) -> Tensor:
    """Return [splits, 1, rows, 1, 64]: whether a key comes after a row's position in the splits."""
    keys = torch.arange(splits * SPLIT).view(splits, 1, SPLIT)
    return (keys > torch.tensor(positions)[:, None])[:, None, :, None]


class _Keys(NamedTuple):
    """Where the keys and values of splits lie in the cache.

    runs [2, splits, hkv, 64 / run]: indices of runs of `run` tokens, the longest run that never crosses a
    block or a split. is_missing [splits * 64]: positions without a block, None if all have one.
    """

    runs: Tensor
    is_missing: Tensor | None
    run: int


def _find_keys(table: Tensor, kv: Tensor, begin: int, splits: int) -> _Keys:
    """Find the keys of `splits` splits from position `begin` on in a request's block table."""
    num_kv_heads, block_size = kv.shape[2], kv.shape[3]
    blocks = table[: -(-(begin + splits * SPLIT) // block_size)].tolist()
    return _find_runs(tuple(blocks), num_kv_heads, block_size, begin, splits)


@functools.lru_cache(maxsize=32)
def _find_runs(blocks: tuple[int, ...], num_kv_heads: int, block_size: int, begin: int, splits: int) -> _Keys:
    run = math.gcd(block_size, SPLIT)
    runs_a_block, end = block_size // run, begin + splits * SPLIT
    first_keys = torch.arange(begin, end, run)
    places, table = first_keys // block_size, torch.tensor(blocks)
    at = table[places.clamp(max=len(blocks) - 1)]
    is_missing = ((at < 0) | (places >= len(blocks))).repeat_interleave(run)
    runs = at.clamp(min=0) * (2 * num_kv_heads * runs_a_block) + first_keys % block_size // run
    heads = torch.arange(0, 2 * num_kv_heads * runs_a_block, runs_a_block).view(2, 1, num_kv_heads, 1)
    return _Keys(runs.view(splits, 1, -1) + heads, is_missing if bool(is_missing.any()) else None, run)


class _Gathered(NamedTuple):
    """Gathered keys or values, float32 [..., n, hkv, 64, hd], and their scales [..., n, hkv, 64]."""

    values: Tensor
    scale: Tensor | None

    def half(self, index: int) -> _Gathered:
        """Return the keys (index 0) or the values (1) of a gather of both."""
        return _Gathered(self.values[index], None if self.scale is None else self.scale[index])


class _Pages(NamedTuple):
    """The cache as runs of `run` tokens."""

    kv: Tensor
    kv_scale: Tensor | None
    run: int

    def read(self, runs: Tensor) -> _Gathered:
        """Gather keys, values or both of n splits; runs [..., n, hkv, 64 / run] are run indices."""
        shape, at = (*runs.shape[:-1], SPLIT), runs.flatten()
        pages = self.kv.reshape(-1, self.run, self.kv.shape[4])
        if self.kv_scale is None:
            return _Gathered(pages.index_select(0, at).float().view(*shape, -1), None)
        stored = pages.view(torch.uint8).index_select(0, at)
        scale = self.kv_scale.reshape(-1, self.run).index_select(0, at)
        return _Gathered(stored.view(self.kv.dtype).float().view(*shape, -1), scale.view(shape))
