"""Sampling as docs/sampling.md specifies it, in NumPy and float64: row by row, each with its own prefix.

Independent of the engine: lists of ids instead of tables, and its own Philox. It is slow and has no batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

Row = np.ndarray[Any, np.dtype[np.float64]]
GREEDY = 1e-5


@dataclass(frozen=True)
class Rules:
    """A request's parameters; the defaults change nothing. stop_ids: ids that min_tokens delays, also eos."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    seed: int = 0


class Logprobs(NamedTuple):
    """One token's entry. Rank 1 is the likeliest, of equals the lowest id; ids at -inf are not listed."""

    logprob: float
    rank: int
    top: list[tuple[int, float]]


def processed(
    logits: Any,
    prompt: Sequence[int],
    output: Sequence[int],
    rules: Rules,
    num_valid_ids: int | None = None,
    grammar: Sequence[bool] | None = None,
) -> Row:
    """Return logits after penalties, bias and masks. `output` ends with the drafts before this row."""
    x = np.array(logits, dtype=np.float64)
    x[~np.isfinite(x)] = -np.inf
    for token in set(prompt) | set(output):
        if 0 <= token < len(x):
            x[token] = (
                x[token] / rules.repetition_penalty if x[token] > 0 else x[token] * rules.repetition_penalty
            )
    for token in set(output):
        if 0 <= token < len(x):
            x[token] -= rules.presence_penalty
            x[token] -= rules.frequency_penalty * list(output).count(token)
    for token, bias in rules.logit_bias.items():
        x[token] += bias
    x[[token in banned_ids(output, rules) for token in range(len(x))]] = -np.inf
    if rules.allowed_token_ids is not None:
        x[[token not in rules.allowed_token_ids for token in range(len(x))]] = -np.inf
    x[len(x) if num_valid_ids is None else num_valid_ids :] = -np.inf
    if grammar is not None:
        x[~np.asarray(grammar, dtype=bool)] = -np.inf
    return x


def banned_ids(output: Sequence[int], rules: Rules) -> set[int]:
    """Return the ids that min_tokens and bad_words forbid next."""
    banned = set(rules.stop_ids) if len(output) < rules.min_tokens else set()
    for word in rules.bad_words:
        before = len(word) - 1
        if before <= len(output) and list(output[len(output) - before :]) == list(word[:-1]):
            banned.add(word[-1])
    return banned


def filtered(x: Row, rules: Rules) -> Row:
    """Return tempered logits, -inf where top-k, top-p or min-p drop; greedy sampling changes nothing."""
    if rules.temperature < GREEDY or not np.isfinite(x).any():
        return x
    x = x / rules.temperature
    if 0 < rules.top_k < len(x):
        x = np.where(x >= np.sort(x)[-rules.top_k], x, -np.inf)
    share = np.exp(x - x.max())
    share /= share.sum()
    is_kept = share >= rules.min_p * share.max()
    if rules.top_p < 1:
        descending = np.sort(share)[::-1]
        last = min(int((np.cumsum(descending) < rules.top_p).sum()), len(x) - 1)
        is_kept &= share >= descending[last]
    return np.where(is_kept, x, -np.inf)


def philox_words(block: int, seed: int, position: int) -> list[int]:
    """Philox4x32-10 of counter (block, 0, position low, position high), key (seed low, seed high)."""
    low = 0xFFFFFFFF
    c0, c1, c2, c3 = block & low, 0, position & low, position >> 32 & low
    k0, k1 = seed & low, seed >> 32 & low
    for _ in range(10):
        first, second = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = second >> 32 ^ c1 ^ k0, second & low, first >> 32 ^ c3 ^ k1, first & low
        k0, k1 = k0 + 0x9E3779B9 & low, k1 + 0xBB67AE85 & low
    return [c0, c1, c2, c3]


def noise(seed: int, position: int, num_ids: int) -> Row:
    """-log(-log1p(-u)), u = x * 2^-32 + 2^-33 rounded to float32 and at most 1 - 2^-24."""
    words = [word for block in range((num_ids + 3) // 4) for word in philox_words(block, seed, position)]
    uniform = np.array(words[:num_ids]).astype(np.float32) * np.float32(2.0**-32) + np.float32(2.0**-33)
    return -np.log(-np.log1p(-np.minimum(uniform, np.float32(1 - 2.0**-24)).astype(np.float64)))


def token(x: Row, rules: Rules, position: int) -> int:
    """The id drawn from `processed` logits at an absolute position; -1 where every id is masked."""
    x = filtered(x, rules)
    if not np.isfinite(x).any():
        return -1
    if rules.temperature >= GREEDY:
        x = x + noise(rules.seed, position, len(x))
    return int(np.argmax(x))


def log_softmax(x: Any) -> Row:
    """Return log probabilities in float64; -inf stays -inf."""
    row = np.array(x, dtype=np.float64)
    row[~np.isfinite(row)] = -np.inf
    return row - row.max() - np.log(np.exp(row - row.max()).sum())


def entropy(x: Any) -> float:
    """Return the entropy of a row of logits, in nats."""
    row = log_softmax(x)
    finite = row[np.isfinite(row)]
    return float(-(np.exp(finite) * finite).sum())


def logprobs(x: Any, chosen: int, num_top: int) -> Logprobs:
    """Return the entry of an id. x: the model's row for mode raw, the `filtered` row for mode processed."""
    row = log_softmax(x)
    order = sorted(range(len(row)), key=lambda v: (-row[v], v))
    top = [(v, float(row[v])) for v in order[:num_top] if np.isfinite(row[v])]
    return Logprobs(float(row[chosen]), order.index(chosen) + 1, top)
