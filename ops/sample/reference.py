"""Drafter-invariant sampling: the token at a position is an argmax under noise keyed by (seed, position, id).

The result of a row does not depend on the other rows of the batch.
"""

from __future__ import annotations

import math
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from compiled_mtp.ops.checks import fail
from compiled_mtp.ops.features import (
    ALL_MASKED,
    BAD_WORDS,
    BIAS,
    DRAWN,
    NOT_FINITE,
    PENALTIES,
    RECENT_IDS,
    STOP_IDS,
)
from compiled_mtp.ops.registry import Launch, operator
from compiled_mtp.ops.signature import BOOL, CONTIGUOUS, F32, I32, I64, Remedy

GREEDY_TEMPERATURE = 1e-5
_LOW_WORD = 0xFFFFFFFF
_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_PHILOX_ROUNDS = 10


_TABLE = Remedy("pass the sampler's parameter tables, one row a slot")
Floats = Annotated[Tensor, "slots", F32, _TABLE]


class SamplingTables(NamedTuple):
    """Sampling parameters, one row per slot.

    `top_k` and `min_p` are off at 0, `top_p` from 1 on. The bits of features say which of the tables after it
    are read. PENALTIES: the three penalties, output_counts (how often each id was emitted) and prompt_seen.
    BIAS: bias (-inf for an id that is never drawn). STOP_IDS: stop_ids (-1 is none), which are masked at
    positions below min_position. BAD_WORDS: bad_words, bad_word_lengths (0 is none) and recent_ids, which
    holds the id emitted at position p in column p % 16, -1 before the output begins.
    """

    temperature: Floats
    top_k: Annotated[Tensor, "slots", I32, _TABLE]
    top_p: Floats
    min_p: Floats
    seed: Annotated[Tensor, "slots", I64, _TABLE]
    features: Annotated[Tensor, "slots", I32, _TABLE]
    repetition_penalty: Floats
    presence_penalty: Floats
    frequency_penalty: Floats
    output_counts: Annotated[Tensor, "slots num_ids", I32, _TABLE]
    prompt_seen: Annotated[Tensor, "slots num_ids", BOOL, _TABLE]
    bias: Annotated[Tensor, "slots num_ids", F32, _TABLE]
    min_position: Annotated[Tensor, "slots", I64, _TABLE]
    stop_ids: Annotated[Tensor, "slots _", I64, _TABLE]
    bad_words: Annotated[Tensor, f"slots num_words {RECENT_IDS}", I64, CONTIGUOUS, _TABLE]
    bad_word_lengths: Annotated[Tensor, "slots num_words", I32, CONTIGUOUS, _TABLE]
    recent_ids: Annotated[Tensor, f"slots {RECENT_IDS}", I64, CONTIGUOUS, _TABLE]


class Sampled(NamedTuple):
    """Per row: its token and the outcome.

    outcome: NOT_FINITE if a raw logit at a valid id is not finite, else ALL_MASKED if nothing is left to
    draw (the token is then 0), else DRAWN.
    """

    token: Annotated[Tensor, "M", I64]
    outcome: Annotated[Tensor, "M", torch.uint8]


class Prefix(NamedTuple):
    """Inputs of M rows in addition to their logits, for the functions of the reference.

    slots [M]; drafts [M, L]: the first num_drafts [M] of a row precede it; positions [M]; column_ids [V] or
    None.
    """

    slots: Tensor
    drafts: Tensor
    num_drafts: Tensor
    positions: Tensor
    column_ids: Tensor | None

    def of_rows(self, rows: Tensor) -> Prefix:
        """Return the inputs of some of the rows."""
        picked = (self.slots[rows], self.drafts[rows], self.num_drafts[rows], self.positions[rows])
        return Prefix(*picked, self.column_ids)

    def by_column(self, table: Tensor) -> Tensor:
        """Return a table [M, num_ids] by column, [M, V]."""
        return table if self.column_ids is None else table[:, self.column_ids]


def philox(block: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """Return four 32-bit words of Philox4x32-10 for each counter (block, 0, position low, position high).

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
        # 64-bit products wrap: words 1 and 3 are right in the low 32 bits, and masked where used.
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


def _penalize(x: Tensor, prefix: Prefix, tables: SamplingTables) -> Tensor:
    slots, drafts = prefix.slots, prefix.drafts
    counts = tables.output_counts[slots]
    places = torch.arange(drafts.shape[1], device=x.device)
    is_before = (places < prefix.num_drafts[:, None]) & (drafts >= 0) & (drafts < counts.shape[1])
    counts.scatter_add_(1, drafts.clamp(0, counts.shape[1] - 1), is_before.to(counts.dtype))
    counts, seen = prefix.by_column(counts), prefix.by_column(tables.prompt_seen[slots])
    penalty = tables.repetition_penalty[slots][:, None]
    x = torch.where(seen | (counts > 0), torch.where(x > 0, x / penalty, x * penalty), x)
    x = x - tables.presence_penalty[slots][:, None] * (counts > 0)
    return x - tables.frequency_penalty[slots][:, None] * counts


def _add_bias(x: Tensor, prefix: Prefix, tables: SamplingTables) -> Tensor:
    return x + prefix.by_column(tables.bias[prefix.slots])


def _ban(x: Tensor, prefix: Prefix, ids: Tensor, is_banned: Tensor, num_ids: int) -> Tensor:
    """Return x with -inf at the ids [M, n] that is_banned [M, n] names."""
    is_banned = is_banned & (ids >= 0) & (ids < num_ids)
    mask = torch.zeros(x.shape[0], num_ids, dtype=torch.int32, device=x.device)
    mask.scatter_add_(1, ids.clamp(0, num_ids - 1), is_banned.to(torch.int32))
    return x.masked_fill(prefix.by_column(mask) > 0, -math.inf)


def _delay_stops(x: Tensor, prefix: Prefix, tables: SamplingTables) -> Tensor:
    is_early = prefix.positions < tables.min_position[prefix.slots]
    return _ban(x, prefix, tables.stop_ids[prefix.slots], is_early[:, None], tables.bias.shape[1])


def _ban_words(x: Tensor, prefix: Prefix, tables: SamplingTables) -> Tensor:
    slots, drafts, num_drafts = prefix.slots, prefix.drafts, prefix.num_drafts[:, None]
    back = torch.arange(1, RECENT_IDS, device=x.device)
    emitted = tables.recent_ids[slots].gather(1, (prefix.positions[:, None] - back) % RECENT_IDS)
    if drafts.shape[1]:
        drafted = drafts.gather(1, (num_drafts - back).clamp(min=0))
        emitted = torch.where(back <= num_drafts, drafted, emitted)
    words, lengths = tables.bad_words[slots], tables.bad_word_lengths[slots].long()
    is_met = lengths > 0
    for i in range(RECENT_IDS - 1):
        ago = lengths - 1 - i
        before = emitted.gather(1, (ago - 1).clamp(min=0))
        is_met = is_met & ((ago < 1) | (words[:, :, i] == before))
    last = words.gather(2, (lengths - 1).clamp(min=0)[:, :, None]).squeeze(2)
    return _ban(x, prefix, last, is_met, tables.bias.shape[1])


_ANY = PENALTIES | BIAS | STOP_IDS | BAD_WORDS
_PROCESSORS = ((PENALTIES, _penalize), (BIAS, _add_bias), (STOP_IDS, _delay_stops), (BAD_WORDS, _ban_words))


def _process(
    x: Tensor, prefix: Prefix, tables: SamplingTables, num_valid_ids: int, masks: Tensor | None
) -> Tensor:
    """Apply penalties, bias and masks to x, in that order; x has no infinity except -inf. Mutates x."""
    features = tables.features[prefix.slots]
    is_any = bool((features & _ANY).any())
    for bit, processor in _PROCESSORS if is_any else ():
        rows = ((features & bit) != 0).nonzero().squeeze(1)
        if rows.numel():
            x[rows] = processor(x[rows], prefix.of_rows(rows), tables)
    if prefix.column_ids is None:
        x[:, num_valid_ids:] = -math.inf
    else:
        x.masked_fill_(prefix.column_ids >= num_valid_ids, -math.inf)
    if masks is not None:
        columns = torch.arange(x.shape[1], device=x.device)
        ids = columns if prefix.column_ids is None else prefix.column_ids
        x.masked_fill_(((masks[:, ids >> 5] >> (ids & 31)) & 1) == 0, -math.inf)
    return _finite_or_minus_inf(x) if is_any else x


def _top_k(x: Tensor, top_k: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values that reach a row's top_k-th, padded with -inf, and their columns, ascending."""
    largest = x.topk(int(top_k.max()), dim=-1).values
    threshold = largest.gather(1, (top_k.long() - 1)[:, None])
    x = torch.where(x >= threshold, x, -math.inf)
    width = max(1, int((x > -math.inf).sum(-1).max()))
    ids = x.topk(width, dim=-1).indices.sort(dim=-1).values
    return x.gather(1, ids), ids


def _top_p_min_p(x: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Keep the fewest largest values whose mass reaches top_p, if they also have min_p of the peak's mass.

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


def _temper(x: Tensor, temperature: Tensor) -> Tensor:
    """Return (x - row peak) / temperature; at low temperatures x / temperature may overflow or lose bits."""
    return (x - x.amax(-1, keepdim=True)) / temperature[:, None]


def _draw(x: Tensor, prefix: Prefix, tables: SamplingTables, has_top_k: bool) -> Tensor:
    """Return the columns of the noisy argmax of processed logits; either all rows have a top_k or none."""
    slots, vocab, columns = prefix.slots, x.shape[1], None
    x = _temper(x, tables.temperature[slots])
    top_p, min_p = tables.top_p[slots], tables.min_p[slots]
    if has_top_k:
        x, columns = _top_k(x, tables.top_k[slots])
    if bool(((top_p < 1.0) | (min_p > 0.0)).any()):
        x = _top_p_min_p(x, top_p, min_p)
    ids = columns
    if prefix.column_ids is not None:
        ids = prefix.column_ids.expand_as(x) if columns is None else prefix.column_ids[columns]
    best = (x + gumbel(tables.seed[slots], prefix.positions, vocab, ids)).argmax(-1)
    return best if columns is None else columns.gather(1, best[:, None]).squeeze(1)


def _prepared(
    logits: Tensor,
    drafts: Tensor,
    positions: Tensor,
    state_index: Tensor,
    tables: SamplingTables,
    num_valid_ids: int,
    column_ids: Tensor | None,
    masks: Tensor | None,
) -> tuple[Tensor, Prefix, Tensor, Tensor]:
    """Return processed logits [M, V], the rows' Prefix, which rows are random, and which have a top_k."""
    rows, requests = logits.shape[0], state_index.shape[0]
    query_len = rows // requests
    slots = state_index.long().repeat_interleave(query_len)
    row = torch.arange(rows, device=logits.device)
    num_drafts = drafts.shape[1] - (query_len - 1) + row % query_len
    prefix = Prefix(slots, drafts.repeat_interleave(query_len, 0), num_drafts, positions, column_ids)
    x = _process(_finite_or_minus_inf(logits), prefix, tables, num_valid_ids, masks)
    is_random = (tables.temperature[slots] >= GREEDY_TEMPERATURE) & (x.amax(-1) > -math.inf)
    top_k = tables.top_k[slots]
    return x, prefix, is_random, (top_k > 0) & (top_k < x.shape[1])


def _lowest_id(x: Tensor, column_ids: Tensor) -> Tensor:
    """Return a row's column of the largest value; among equal ones that of the lowest id."""
    ids = torch.where(x == x.amax(-1, keepdim=True), column_ids, torch.iinfo(torch.int64).max)
    return ids.argmin(-1)


def _whole_requests(
    logits: Tensor,
    M: int,
    V: int,
    B: int,
    num_ids: int,
    num_drafts: int,
    num_valid_ids: int,
    column_ids: Tensor | None,
    masks: Tensor | None,
) -> None:
    if B == 0 or M % B:
        raise fail("logits", f"have a multiple of {B} rows", M, "pad whole requests")
    if num_drafts < M // B - 1:
        raise fail("drafts", f"have at least {M // B - 1} columns", num_drafts, "pass those of the window")
    if column_ids is None and num_ids != V:
        raise fail("logits", f"have {num_ids} columns", V, "name the columns' ids")
    if not 0 < num_valid_ids <= num_ids:
        raise fail(
            "num_valid_ids", f"be in 1..{num_ids}", num_valid_ids, "pass the tokenizer's number of ids"
        )
    if masks is not None and masks.shape[1] * 32 < num_ids:
        raise fail("masks", f"have {-(-num_ids // 32)} words a row", masks.shape[1], "give every id a bit")


# Slots, positions and parameters are written before the head, a fence, which computes the logits.
_EARLY = ("state_index", "positions", "temperature", "top_k", "top_p", "min_p", "features")


@operator(
    launches=(
        Launch("tile_kernel", reads_early=_EARLY),
        Launch("finish_kernel", reads_early=("state_index", "temperature", "top_k", "top_p", "min_p")),
    ),
    check=_whole_requests,
    has_cpu_route=True,
)
def sample(
    logits: Annotated[Tensor, "M V", F32],
    drafts: Annotated[Tensor, "B num_drafts", I64],
    positions: Annotated[Tensor, "M", I64, Remedy("pass one entry for each row of logits")],
    state_index: Annotated[Tensor, "B", I32],
    tables: SamplingTables,
    num_valid_ids: int,
    column_ids: Annotated[Tensor, "V", I64] | None,
    masks: Annotated[Tensor, "M _", I32] | None,
) -> Sampled:
    """Draw the token of every row under noise keyed by (seed, position, id), independent of the other rows.

    `logits` [M, V] with M = B*W rows, request-major. `drafts` [B, L]: tokens after the last one that the
    tables count; the first L - (W - 1) + k of them precede row k of a request: in a window (L = W - 1) the
    drafts before the row, in a chain (W = 1) all drafts so far. `positions` [M]: the absolute position of the
    token to draw. `state_index` [B]: a request's slot in the tables. `column_ids` [V]: the ids of the columns
    where they are not 0, 1, ...; tables and noise go by id. `masks` [M, >= num_ids / 32]: one bit per id, the
    lowest id first; an id whose bit is 0 is never drawn.

    Order: repetition penalty (prompt and output), presence, frequency (output only), bias, masks (`stop_ids`
    while position < min_position; the last id of bad words whose other ids directly precede it; ids >=
    `num_valid_ids`; `masks`), temperature, top-k (ties with the threshold stay), top-p (likewise), min-p,
    + noise, argmax, lowest id on ties. A temperature below 1e-5 is greedy: no noise, no filter. A logit that
    is not finite counts as -inf. Source of the rule: Daliri, Musco, Suresh, arXiv 2408.07978.
    """
    if column_ids is None:
        raw = logits[:, :num_valid_ids]
    else:
        raw = torch.where(column_ids < num_valid_ids, logits, 0.0)
    x, prefix, is_random, has_top_k = _prepared(
        logits, drafts, positions, state_index, tables, num_valid_ids, column_ids, masks
    )
    column = x.argmax(-1) if column_ids is None else _lowest_id(x, column_ids)
    kinds = ((is_random & ~has_top_k, False), (is_random & has_top_k, True)) if bool(is_random.any()) else ()
    for chosen, is_limited in kinds:
        row = chosen.nonzero().squeeze(1)
        if row.numel():
            column[row] = _draw(x[row], prefix.of_rows(row), tables, is_limited)
    has_any = x.amax(-1) > -math.inf
    token = torch.where(has_any, column if column_ids is None else column_ids[column], 0)
    outcome = torch.where(has_any, DRAWN, ALL_MASKED).masked_fill(~raw.isfinite().all(-1), NOT_FINITE)
    return Sampled(token, outcome.to(torch.uint8))


@operator(check=_whole_requests)
def filter_logits(
    logits: Annotated[Tensor, "M V", F32],
    drafts: Annotated[Tensor, "B num_drafts", I64],
    positions: Annotated[Tensor, "M", I64, Remedy("pass one entry for each row of logits")],
    state_index: Annotated[Tensor, "B", I32],
    tables: SamplingTables,
    num_valid_ids: int,
    column_ids: Annotated[Tensor, "V", I64] | None,
    masks: Annotated[Tensor, "M _", I32] | None,
) -> Annotated[Tensor, "M V", F32]:
    """Return the logits [M, V] that `sample` adds noise to, -inf at ids that cannot be drawn.

    A random row has the logits after temperature and filters, shifted to a largest of 0; a greedy row has
    those after the masks. The arguments are those of `sample`.
    """
    x, prefix, is_random, has_top_k = _prepared(
        logits, drafts, positions, state_index, tables, num_valid_ids, column_ids, masks
    )
    row = is_random.nonzero().squeeze(1)
    if row.numel():
        slots = prefix.slots[row]
        tempered = _temper(x[row], tables.temperature[slots])
        limited = has_top_k[row].nonzero().squeeze(1)
        if limited.numel():
            few, columns = _top_k(tempered[limited], tables.top_k[slots[limited]])
            alone = torch.full_like(tempered[limited], -math.inf).scatter_(1, columns, few)
            tempered[limited] = alone
        x[row] = _top_p_min_p(tempered, tables.top_p[slots], tables.min_p[slots])
    return x
