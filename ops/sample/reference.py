"""Drafter-invariant sampling: the token at a position is an argmax under noise keyed by (seed, position, id).

Nothing here depends on which rows stand beside a row. Sums over the vocabulary run in a fixed order (one by
one, or tiles of 4,096 and then one by one), because ATen splits a float sum with one output over its threads.
"""

from __future__ import annotations

import math
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from compiled_mtp.ops.checks import fail
from compiled_mtp.ops.registry import Launch, operator
from compiled_mtp.ops.signature import BOOL, F32, I32, I64, Remedy

GREEDY_TEMPERATURE = 1e-5
_TILE = 4096
_LOW_WORD = 0xFFFFFFFF
_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_PHILOX_ROUNDS = 10


_TABLE = Remedy("pass the sampler's parameter tables, one row a slot")
_SWITCH = Remedy("give it one row a slot, or a first dimension of 0")
Floats = Annotated[Tensor, "slots", F32, _TABLE]


class SamplingTables(NamedTuple):
    """How to sample, a row a slot.

    `top_k` and `min_p` are off at 0, `top_p` from 1 on. A first dimension of 0 switches `output_counts`,
    `prompt_seen`, `bias` or `stop_ids` (-1 is none) off.
    """

    temperature: Floats
    top_k: Annotated[Tensor, "slots", I32, _TABLE]
    top_p: Floats
    min_p: Floats
    repetition_penalty: Floats
    presence_penalty: Floats
    frequency_penalty: Floats
    seed: Annotated[Tensor, "slots", I64, _TABLE]
    output_counts: Annotated[Tensor, "slots|0 V", I32, _SWITCH]
    prompt_seen: Annotated[Tensor, "slots|0 V", BOOL, _SWITCH]
    bias: Annotated[Tensor, "slots|0 V", F32, _SWITCH]
    min_position: Annotated[Tensor, "slots", I64, _TABLE]
    stop_ids: Annotated[Tensor, "slots|0 _", I64, _SWITCH]


class Sampled(NamedTuple):
    """Of each row: its token, the log-softmax of the raw logits at it, and whether its raw logits at valid
    ids are all finite."""

    token: Annotated[Tensor, "M", I64]
    logprob: Annotated[Tensor, "M", F32]
    is_finite: Annotated[Tensor, "M", BOOL]


def philox(block: Tensor, seed: Tensor, position: Tensor) -> Tensor:
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


def gumbel(seed: Tensor, position: Tensor, vocab: int, ids: Tensor | None = None) -> Tensor:
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


def _finite_or_minus_inf(x: Tensor) -> Tensor:
    return torch.where(torch.isfinite(x), x, -math.inf)


def _row_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension of a contiguous [M, N], in an order that depends on N alone."""
    whole = x.shape[1] // _TILE * _TILE
    tiles = x[:, :whole].view(x.shape[0], whole // _TILE, _TILE).sum(-1)
    return torch.cat([tiles, x[:, whole:].sum(-1, keepdim=True)], dim=1).cumsum(-1)[:, -1]


def _process(
    x: Tensor,
    tokens: Tensor,
    positions: Tensor,
    slots: Tensor,
    query_len: int,
    tables: SamplingTables,
    num_valid_ids: int,
) -> Tensor:
    """Penalties, bias and masks, in that order; returns a new tensor, or `x` when nothing applies."""
    rows, vocab = x.shape
    has_counts, has_prompt = tables.output_counts.shape[0] > 0, tables.prompt_seen.shape[0] > 0
    counts = None
    if has_counts:
        counts = tables.output_counts[slots]
        drafts = tokens.view(-1, query_len)
        is_valid = ((drafts >= 0) & (drafts < vocab)).to(counts.dtype)
        by_request = counts.view(-1, query_len, vocab)
        for k in range(1, query_len):
            index = drafts[:, 1 : k + 1].clamp(0, vocab - 1)
            by_request[:, k].scatter_add_(1, index, is_valid[:, 1 : k + 1])
    if has_counts or has_prompt:
        is_seen = tables.prompt_seen[slots] if has_prompt else torch.zeros_like(x, dtype=torch.bool)
        if counts is not None:
            is_seen = is_seen | (counts > 0)
        penalty = tables.repetition_penalty[slots][:, None]
        x = torch.where(is_seen, torch.where(x > 0, x / penalty, x * penalty), x)
    if counts is not None:
        x = x - tables.presence_penalty[slots][:, None] * (counts > 0)
        x = x - tables.frequency_penalty[slots][:, None] * counts
    if tables.bias.shape[0] > 0:
        x = x + tables.bias[slots]
    if tables.stop_ids.shape[0] > 0 and tables.stop_ids.shape[1] > 0:
        is_early = (positions < tables.min_position[slots])[:, None]
        ids = tables.stop_ids[slots]
        is_banned = is_early & (ids >= 0) & (ids < vocab)
        mask = torch.zeros(rows, vocab, dtype=torch.int32, device=x.device)
        mask.scatter_add_(1, ids.clamp(0, vocab - 1), is_banned.to(torch.int32))
        x = x.masked_fill(mask > 0, -math.inf)
    if num_valid_ids < vocab:
        x = x.clone()
        x[:, num_valid_ids:] = -math.inf
    return x


def _top_k(x: Tensor, top_k: Tensor) -> tuple[Tensor, Tensor]:
    """The values that are at least a row's top_k-th, and their ids ascending; the rest is -inf."""
    largest = x.topk(int(top_k.max()), dim=-1).values
    threshold = largest.gather(1, (top_k.long() - 1)[:, None])
    x = torch.where(x >= threshold, x, -math.inf)
    width = max(1, int((x > -math.inf).sum(-1).max()))
    ids = x.topk(width, dim=-1).indices.sort(dim=-1).values
    return x.gather(1, ids), ids


def _top_p_min_p(x: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
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


def _draw(x: Tensor, positions: Tensor, slots: Tensor, tables: SamplingTables, has_top_k: bool) -> Tensor:
    """The noisy argmax of processed logits whose rows all have a top_k, or none."""
    vocab = x.shape[1]
    x = x / tables.temperature[slots][:, None]
    top_p, min_p, ids = tables.top_p[slots], tables.min_p[slots], None
    if has_top_k:
        x, ids = _top_k(x, tables.top_k[slots])
    if bool(((top_p < 1.0) | (min_p > 0.0)).any()):
        x = _top_p_min_p(x, top_p, min_p)
    best = (x + gumbel(tables.seed[slots], positions, vocab, ids)).argmax(-1)
    return best if ids is None else ids.gather(1, best[:, None]).squeeze(1)


def _logprob(logits: Tensor, token: Tensor) -> Tensor:
    peak = logits.amax(-1, keepdim=True)
    has_any = peak > -math.inf
    peak = torch.where(has_any, peak, 0.0)
    log_sum = torch.log(_row_sum(torch.exp(logits - peak)))[:, None]
    chosen = logits.gather(1, token[:, None])
    return torch.where(has_any, (chosen - peak) - log_sum, -math.inf).squeeze(1)


def _whole_requests(logits: Tensor, M: int, V: int, B: int, num_valid_ids: int) -> None:
    if B == 0 or M % B:
        raise fail("logits", f"have a multiple of {B} rows", M, "pad whole requests")
    if not 0 < num_valid_ids <= V:
        raise fail("num_valid_ids", f"be in 1..{V}", num_valid_ids, "pass the tokenizer's number of ids")


# Whose row it is and how to sample it is older than the head, a fence, which makes the logits.
@operator(
    launches=(
        Launch(
            "tile_kernel",
            reads_early=(
                "state_index", "positions", "temperature", "top_k", "top_p", "min_p", "min_position"
            ),
        ),
        Launch("finish_kernel", reads_early=("state_index", "temperature", "top_k", "top_p", "min_p")),
    ),
    check=_whole_requests,
)  # fmt: skip
def sample(
    logits: Annotated[Tensor, "M V", F32],
    tokens: Annotated[Tensor, "M", I64, Remedy("pass one entry for each row of logits")],
    positions: Annotated[Tensor, "M", I64, Remedy("pass one entry for each row of logits")],
    state_index: Annotated[Tensor, "B", I32],
    tables: SamplingTables,
    num_valid_ids: int,
) -> Sampled:
    """Draw the token of every row under noise keyed by (seed, position, id), independent of the other rows.

    `logits` [M, V] with M = B*W rows, request-major; `tokens` [M], the input token of each row; `positions`
    [M], the absolute position of the token to draw; `state_index` [B], a request's slot in the tables.

    Order: repetition penalty (prompt and output), presence, frequency (output only), bias, masks (`stop_ids`
    while position < min_position; ids >= `num_valid_ids`), / temperature, top-k (ties with the threshold
    stay), top-p (likewise), min-p, + noise, argmax, lowest id on ties. A temperature below 1e-5 is greedy: no
    noise, no filter. Row k of a window also counts the drafts tokens[b*W+1 .. b*W+k] as output. A logit that
    is not finite counts as -inf; a row with nothing finite left gives token 0 (logprob -inf where no raw
    logit is finite).
    Source of the rule: Daliri, Musco, Suresh, arXiv 2408.07978.
    """
    rows, vocab = logits.shape
    query_len = rows // state_index.shape[0]
    slots = state_index.long().repeat_interleave(query_len)
    is_finite = logits[:, :num_valid_ids].isfinite().all(-1)
    logits = _finite_or_minus_inf(logits)
    processed = _process(logits, tokens, positions, slots, query_len, tables, num_valid_ids)
    if processed is not logits:
        processed = _finite_or_minus_inf(processed)
    token = processed.argmax(-1)
    is_random = (tables.temperature[slots] >= GREEDY_TEMPERATURE) & (processed.amax(-1) > -math.inf)
    top_k = tables.top_k[slots]
    has_top_k = (top_k > 0) & (top_k < vocab)
    for chosen, is_limited in ((is_random & ~has_top_k, False), (is_random & has_top_k, True)):
        row = chosen.nonzero().squeeze(1)
        if row.numel():
            token[row] = _draw(processed[row], positions[row], slots[row], tables, is_limited)
    return Sampled(token, _logprob(logits, token), is_finite)
