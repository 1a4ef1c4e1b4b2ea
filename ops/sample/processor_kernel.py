"""Device functions of the sampler's penalties, delayed stop ids and bad words."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def penalized(
    x,
    ids,
    inside,
    drafts,
    num_counted,
    counts,
    prompt,
    own_repetition,
    own_presence,
    own_frequency,
):
    """Apply the three penalties to x; `drafts`, `counts` and `prompt` point at the request's row."""
    count = tl.load(counts + ids, mask=inside, other=0)
    for i in range(num_counted):
        count += (ids == tl.load(drafts + i)).to(tl.int32)
    is_seen = (count > 0) | (tl.load(prompt + ids, mask=inside, other=0) != 0)
    smaller = tl.where(x > 0, tl.div_rn(x, tl.zeros_like(x) + own_repetition), x * own_repetition)
    x = tl.where(is_seen, smaller, x)
    x = x - own_presence * (count > 0).to(tl.float32)
    return x - own_frequency * count.to(tl.float32)


@triton.jit
def without_stops(x, ids, stop_ids, NUM_STOPS: tl.constexpr):
    for i in range(NUM_STOPS):
        x = tl.where(ids == tl.load(stop_ids + i), float("-inf"), x)
    return x


@triton.jit
def without_bad_words(
    x,
    ids,
    drafts,
    num_counted,
    recent_ids,
    position,
    words,
    lengths,
    NUM_WORDS: tl.constexpr,
    RECENT_IDS: tl.constexpr,
):
    """Set x to -inf at the last id of every bad word whose other ids directly precede the position.

    Id i of a word must equal the token length - 1 - i positions earlier, a draft or an emitted token.
    """
    lane = tl.arange(0, RECENT_IDS)
    for i in range(NUM_WORDS):
        length = tl.load(lengths + i)
        if length > 0:
            ago = length - 1 - lane
            is_before = ago > 0
            is_draft = is_before & (ago <= num_counted)
            drafted = tl.load(drafts + num_counted - ago, mask=is_draft, other=0)
            column = (position - ago) & (RECENT_IDS - 1)
            emitted = tl.load(recent_ids + column, mask=is_before, other=0)
            word = tl.load(words + i * RECENT_IDS + lane)
            differs = is_before & (word != tl.where(is_draft, drafted, emitted))
            last = tl.load(words + i * RECENT_IDS + length - 1)
            is_met = tl.sum(differs.to(tl.int32), 0) == 0
            x = tl.where(is_met & (ids == last), float("-inf"), x)
    return x
