"""Drafter-invariant sampling: the token at a position is an argmax under noise keyed by (seed, position, id).

Nothing here depends on which rows stand beside a row. Sums over the vocabulary run in a fixed order (one by
one, or tiles of 4,096 and then one by one), because ATen splits a float sum with one output over its threads.
"""

from __future__ import annotations

import math

import torch

GREEDY_TEMPERATURE = 1e-5
_TILE = 4096
_LOW_WORD = 0xFFFFFFFF
_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_PHILOX_ROUNDS = 10


def philox(block: torch.Tensor, seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Four 32-bit words of Philox4x32-10 for each counter (block, 0, position low, position high).

    `block` [R or 1, n] i64 below 2^32, `seed` and `position` [R] i64 (two's complement halves); returns
    [R, n, 4] i64 in 0..2^32-1. Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    key = [(seed & _LOW_WORD)[:, None], ((seed >> 32) & _LOW_WORD)[:, None]]
    counter = [
        block.expand(seed.shape[0], -1),
        torch.zeros_like(key[0]),
        (position & _LOW_WORD)[:, None],
        ((position >> 32) & _LOW_WORD)[:, None],
    ]
    for _ in range(_PHILOX_ROUNDS):
        # 64-bit products wrap, and only the low 32 bits of an odd word are right: one mask, where it is used.
        first = counter[0] * _PHILOX_MULTIPLIERS[0]
        second = counter[2] * _PHILOX_MULTIPLIERS[1]
        counter = [
            ((second >> 32) ^ counter[1] ^ key[0]) & _LOW_WORD,
            second,
            ((first >> 32) ^ counter[3] ^ key[1]) & _LOW_WORD,
            first,
        ]
        key = [(word + step) & _LOW_WORD for word, step in zip(key, _PHILOX_KEY_STEPS, strict=True)]
    shape = (seed.shape[0], block.shape[1])
    return torch.stack([(word & _LOW_WORD).expand(shape) for word in counter], dim=-1)


def gumbel(
    seed: torch.Tensor, position: torch.Tensor, vocab: int, ids: torch.Tensor | None = None
) -> torch.Tensor:
    """Gumbel noise G(seed, position, id), float32 [R, vocab] for all ids or [R, n] for `ids` [R, n] i64.

    G = -log(-log1p(-u)), u = x * 2^-32 + 2^-33 in float32, at most 1 - 2^-24, where x is word id % 4 of block
    id // 4.
    """
    if ids is None:
        block = torch.arange((vocab + 3) // 4, device=seed.device)[None, :]
        word = philox(block, seed, position).flatten(1)[:, :vocab]
    else:
        word = philox(ids >> 2, seed, position).gather(-1, (ids & 3)[..., None]).squeeze(-1)
    uniform = (word.to(torch.float32) * 2.0**-32 + 2.0**-33).clamp_(max=1.0 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _finite_or_minus_inf(x: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.isfinite(x), x, -math.inf)


def _row_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension of a contiguous [M, N], in an order that depends on N alone."""
    whole = x.shape[1] // _TILE * _TILE
    tiles = x[:, :whole].view(x.shape[0], whole // _TILE, _TILE).sum(-1)
    return torch.cat([tiles, x[:, whole:].sum(-1, keepdim=True)], dim=1).cumsum(-1)[:, -1]


def _process(
    x: torch.Tensor,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    query_len: int,
    repetition_penalty: torch.Tensor,
    presence_penalty: torch.Tensor,
    frequency_penalty: torch.Tensor,
    output_counts: torch.Tensor,
    prompt_seen: torch.Tensor,
    bias: torch.Tensor,
    min_position: torch.Tensor,
    stop_ids: torch.Tensor,
    num_valid_ids: int,
) -> torch.Tensor:
    """Penalties, bias and masks, in that order; returns a new tensor, or `x` when nothing applies."""
    rows, vocab = x.shape
    has_counts, has_prompt = output_counts.shape[0] > 0, prompt_seen.shape[0] > 0
    counts = None
    if has_counts:
        counts = output_counts[slots]
        window = tokens.view(-1, query_len)
        is_valid = ((window >= 0) & (window < vocab)).to(counts.dtype)
        by_request = counts.view(-1, query_len, vocab)
        for k in range(1, query_len):
            index = window[:, 1 : k + 1].clamp(0, vocab - 1)
            by_request[:, k].scatter_add_(1, index, is_valid[:, 1 : k + 1])
    if has_counts or has_prompt:
        is_seen = prompt_seen[slots] if has_prompt else torch.zeros_like(x, dtype=torch.bool)
        if counts is not None:
            is_seen = is_seen | (counts > 0)
        penalty = repetition_penalty[slots][:, None]
        x = torch.where(is_seen, torch.where(x > 0, x / penalty, x * penalty), x)
    if counts is not None:
        x = x - presence_penalty[slots][:, None] * (counts > 0)
        x = x - frequency_penalty[slots][:, None] * counts
    if bias.shape[0] > 0:
        x = x + bias[slots]
    if stop_ids.shape[0] > 0 and stop_ids.shape[1] > 0:
        is_early = (positions < min_position[slots])[:, None]
        ids = stop_ids[slots]
        is_banned = is_early & (ids >= 0) & (ids < vocab)
        mask = torch.zeros(rows, vocab, dtype=torch.int32, device=x.device)
        mask.scatter_add_(1, ids.clamp(0, vocab - 1), is_banned.to(torch.int32))
        x = x.masked_fill(mask > 0, -math.inf)
    if num_valid_ids < vocab:
        x = x.clone()
        x[:, num_valid_ids:] = -math.inf
    return x


def _top_k(x: torch.Tensor, top_k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The values that are at least a row's top_k-th, and their ids ascending; the rest is -inf."""
    largest = x.topk(int(top_k.max()), dim=-1).values
    threshold = largest.gather(1, (top_k.long() - 1)[:, None])
    x = torch.where(x >= threshold, x, -math.inf)
    width = max(1, int((x > -math.inf).sum(-1).max()))
    ids = x.topk(width, dim=-1).indices.sort(dim=-1).values
    return x.gather(1, ids), ids


def _top_p_min_p(x: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Keep the fewest largest values whose mass reaches top_p, and of those what has min_p of the peak.

    Values equal to the smallest one that top-p keeps are kept as well.
    """
    peak = x.amax(-1, keepdim=True)
    weight = torch.exp(x - torch.where(peak > -math.inf, peak, 0.0))
    keep = weight >= min_p[:, None]
    if bool((top_p < 1.0).any()):
        descending, order = x.sort(dim=-1, descending=True)
        reached = weight.double().gather(1, order).cumsum(-1)
        target = top_p.double()[:, None] * reached[:, -1:]
        count = (reached < target).sum(-1, keepdim=True).clamp_(max=x.shape[1] - 1)
        threshold = descending.gather(1, count)
        keep &= (x >= threshold) | (top_p >= 1.0)[:, None]
    return torch.where(keep, x, -math.inf)


def _draw(
    x: torch.Tensor,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    top_k: torch.Tensor | None,
    seed: torch.Tensor,
) -> torch.Tensor:
    """The noisy argmax of processed logits; `top_k` is None when no row has one."""
    vocab = x.shape[1]
    x = x / temperature[:, None]
    ids = None
    if top_k is not None:
        x, ids = _top_k(x, top_k)
    if bool(((top_p < 1.0) | (min_p > 0.0)).any()):
        x = _top_p_min_p(x, top_p, min_p)
    best = (x + gumbel(seed, positions, vocab, ids)).argmax(-1)
    return best if ids is None else ids.gather(1, best[:, None]).squeeze(1)


def _logprob(logits: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    peak = logits.amax(-1, keepdim=True)
    has_any = peak > -math.inf
    peak = torch.where(has_any, peak, 0.0)
    log_sum = torch.log(_row_sum(torch.exp(logits - peak)))[:, None]
    chosen = logits.gather(1, token[:, None])
    return torch.where(has_any, (chosen - peak) - log_sum, -math.inf).squeeze(1)


def sample(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    state_index: torch.Tensor,
    temperature: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    repetition_penalty: torch.Tensor,
    presence_penalty: torch.Tensor,
    frequency_penalty: torch.Tensor,
    top_k: torch.Tensor,
    seed: torch.Tensor,
    output_counts: torch.Tensor,
    prompt_seen: torch.Tensor,
    bias: torch.Tensor,
    min_position: torch.Tensor,
    stop_ids: torch.Tensor,
    num_valid_ids: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token a row; the specification that the kernel follows (shapes and rules: see op.py)."""
    rows, vocab = logits.shape
    query_len = rows // state_index.shape[0]
    slots = state_index.long().repeat_interleave(query_len)
    logits = _finite_or_minus_inf(logits)
    processed = _process(
        logits,
        tokens,
        positions,
        slots,
        query_len,
        repetition_penalty,
        presence_penalty,
        frequency_penalty,
        output_counts,
        prompt_seen,
        bias,
        min_position,
        stop_ids,
        num_valid_ids,
    )
    if processed is not logits:
        processed = _finite_or_minus_inf(processed)
    token = processed.argmax(-1)
    is_random = (temperature[slots] >= GREEDY_TEMPERATURE) & (processed.amax(-1) > -math.inf)
    limit = top_k[slots]
    is_limited = (limit > 0) & (limit < vocab)
    for chosen, has_top_k in ((is_random & ~is_limited, False), (is_random & is_limited, True)):
        row = chosen.nonzero().squeeze(1)
        if row.numel() == 0:
            continue
        slot = slots[row]
        token[row] = _draw(
            processed[row],
            positions[row],
            temperature[slot],
            top_p[slot],
            min_p[slot],
            top_k[slot] if has_top_k else None,
            seed[slot],
        )
    return token, _logprob(logits, token)
