"""What drafts from the text save and cost in rounds, on texts that repeat themselves, diverge, or do neither.

    python -m tests.ops.test_find_drafts_texts        # the table of docs/experiments.md

The rounds are those of one request: `find_drafts` chooses, and a chain of `depth` drafts is right at random.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from compiled_mtp.benchmarks.released_shapes import rate_for
from compiled_mtp.config import EngineConfig
from compiled_mtp.frontend.tokenizer import Tokenizer
from compiled_mtp.ops.find_drafts import (
    FIRST_CHAIN_KEPT,
    FIRST_THRESHOLD,
    LookupState,
    find_drafts,
)
from compiled_mtp.ops.window import MAX_DRAFTS

ROOT = Path(__file__).resolve().parents[2]
OUTPUT = 300
Text = list[int]


def copied(rng: random.Random) -> Text:
    """A passage, and the passage again with a few ids replaced, inserted or removed."""
    passage = [rng.randrange(1000) for _ in range(OUTPUT)]
    edited: Text = []
    at = 0
    while at < len(passage):
        count = rng.randint(10, 60)
        edited += [*passage[at : at + count], *(rng.randrange(1000) for _ in range(rng.randint(0, 3)))]
        at += count + rng.randint(0, 2)
    return passage + (edited + passage)[:OUTPUT]


def log_lines(rng: random.Random) -> Text:
    """Lines of one form, whose four fields of three ids differ."""
    words, ids = [list(range(at, at + 12)) for at in (1000, 1020, 1040, 1060)], Text()
    while len(ids) < 1500 + OUTPUT:
        for word in words:
            ids += [*word, *(rng.randrange(100) for _ in range(3))]
    return ids[: 1500 + OUTPUT]


def passages(rng: random.Random) -> Text:
    """Passages that come again and again, each time with another end."""
    known = [[rng.randrange(400) for _ in range(17)] for _ in range(4)]
    ids: Text = []
    while len(ids) < 1500 + OUTPUT:
        ids += [*rng.choice(known), *(rng.randrange(400) for _ in range(8))]
    return ids[: 1500 + OUTPUT]


def of_few_ids(count: int, length: int) -> Callable[[random.Random], Text]:
    return lambda rng: [rng.randrange(count) for _ in range(length)]


def of_files(pattern: str) -> Callable[[random.Random], Text]:
    words = "".join(path.read_text(encoding="utf-8") for path in sorted(ROOT.glob(pattern)))
    ids = Tokenizer(EngineConfig().model).encode(words)

    def draw(rng: random.Random) -> Text:
        at = rng.randrange(len(ids) - 4000)
        return ids[at : at + 3000 + OUTPUT]

    return draw


TEXTS: dict[str, Callable[[random.Random], Text]] = {
    "a copy with edits": copied,
    "lines of one form": log_lines,
    "passages with another end": passages,
    "random ids, two": of_few_ids(2, 20_000),
    "random ids, four": of_few_ids(4, 20_000),
    "random ids, 50,000": of_few_ids(50_000, 2000),
    "pages of docs/": of_files("docs/*.md"),
    "Python source": of_files("compiled_mtp/models/*.py"),
}


def count_rounds(ids: Text, rate: float, depth: int, wide: int, seed: int, *, lookup: bool) -> int:
    """The rounds that the last OUTPUT ids of a text take with a chain that is right at `rate`."""
    end = len(ids) - 1
    rng = random.Random(seed)
    right = [rng.random() < rate for _ in range(len(ids) + MAX_DRAFTS)]
    pos = torch.tensor([0, len(ids) - OUTPUT])
    token_ids = torch.tensor([[0] * len(ids), ids], dtype=torch.int32)
    one = torch.ones(2, dtype=torch.int32)
    state = LookupState(0 * one, FIRST_THRESHOLD * one, FIRST_CHAIN_KEPT * one)
    drafts, chain = torch.zeros(2, MAX_DRAFTS, dtype=torch.int64), torch.zeros(1, depth, dtype=torch.int64)
    index, accepted, rounds = one[:1], None, 0
    while int(pos[1]) < end:
        at, verify = int(pos[1]) + 1, depth
        if lookup:
            find_drafts(token_ids, index, pos, chain, state, drafts, accepted)
        if int(state.matched[1]):
            verify = wide or depth
            drafted = drafts[1, :verify].tolist()
            agrees = [one == other for one, other in zip(drafted, ids[at:], strict=False)]
        else:
            agrees = right[at : at + verify]
        kept = [*agrees, False].index(False)
        accepted = torch.full((1, verify + 3), kept + 1)
        pos[1] = min(int(pos[1]) + kept + 1, end)
        rounds += 1
    return rounds


def ratio(name: str, tokens: float, depth: int, wide: int, texts: int) -> float:
    """The rounds with lookup relative to those without; a chain of three gives `tokens` per round."""
    rate, totals = rate_for(tokens, 3), [0, 0]
    for seed in range(texts):
        ids = TEXTS[name](random.Random(seed))
        for lookup in (False, True):
            totals[lookup] += count_rounds(ids, rate, depth, wide, seed, lookup=lookup)
    return totals[True] / totals[False]


# Texts, tokens per round, depth, drafts of a wide round, the least and the most of the ratio.
BOUNDS = [
    ("a copy with edits", 2.6, 3, MAX_DRAFTS, 0.1, 0.5),
    ("a copy with edits", 3.7, 3, 0, 0.8, 1.02),
    ("lines of one form", 2.6, 3, MAX_DRAFTS, 0.5, 1.02),
    ("lines of one form", 3.7, 5, 0, 0.9, 1.08),
    ("passages with another end", 3.7, 3, 0, 0.8, 1.08),
    ("random ids, two", 3.7, 3, 0, 0.95, 1.18),
    ("random ids, four", 3.7, 3, MAX_DRAFTS, 0.95, 1.05),
    ("random ids, 50,000", 2.6, 3, MAX_DRAFTS, 1.0, 1.0),
    ("pages of docs/", 2.6, 3, MAX_DRAFTS, 0.8, 1.01),
    ("pages of docs/", 3.7, 5, 0, 0.9, 1.03),
    ("Python source", 3.7, 3, 0, 0.9, 1.03),
]


@pytest.mark.parametrize(("name", "tokens", "depth", "wide", "least", "most"), BOUNDS)
def test_lookup_saves_rounds_or_costs_few(
    name: str, tokens: float, depth: int, wide: int, least: float, most: float
) -> None:
    assert least <= ratio(name, tokens, depth, wide, 6) <= most


if __name__ == "__main__":
    print("text | wide rounds, 2.6 | 3.7 | no wide rounds, 2.6 | 3.7 | depth 5, no wide rounds, 3.7")
    cases = [(2.6, 3, MAX_DRAFTS), (3.7, 3, MAX_DRAFTS), (2.6, 3, 0), (3.7, 3, 0), (3.7, 5, 0)]
    for name in TEXTS:
        print(" | ".join([name, *(f"{ratio(name, *case, 40):.3f}" for case in cases)]), flush=True)
