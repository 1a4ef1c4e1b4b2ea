"""Forced ids: given tokens are committed in the place of samples, whatever is drafted."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from compiled_mtp.ops.features import PENALTIES
from compiled_mtp.step import Step
from tests import tiny

CONFIG = tiny.tiny_config()
PROMPT = [(5 * i * i + i) % 97 for i in range(66)]
FORCED = [(31 * i + 7) % 97 for i in range(19)]
COUNT = 32


def start(step: Step, slot: int) -> list[int]:
    """Return the first token of a request with penalties whose first tokens are forced."""
    tiny.admit(step, slot, seed=5, temperature=0.9)
    slots = step.slots
    slots.features[slot] = PENALTIES
    slots.presence_penalty[slot] = 0.7
    slots.frequency_penalty[slot] = 0.4
    assert slots.forced_ids is not None
    slots.forced_ids[slot, len(PROMPT) : len(PROMPT) + len(FORCED)] = torch.tensor(FORCED)
    return [tiny.prefill(step, slot, PROMPT)]


@cache
def plain_stream() -> list[int]:
    """Decode the request alone, one token at a time."""
    step = tiny.build_step(CONFIG, 0, has_forced_ids=True)
    tokens = start(step, 1)
    while len(tokens) < COUNT:
        tokens += tiny.decode(step, [1])[0]
    return tokens


@pytest.mark.parametrize("mtp_step", [0, 1, 3, 7])
@pytest.mark.parametrize("drafts", ["own", "forced"])
def test_given_tokens_are_committed_and_the_next_follow_them(mtp_step: int, drafts: str) -> None:
    assert plain_stream()[: len(FORCED)] == FORCED
    step = tiny.build_step(CONFIG, mtp_step, has_forced_ids=True)
    tokens, rounds = start(step, 2), 0
    # Another request, without forced ids, shares the rounds.
    tiny.admit(step, 1, seed=9, temperature=0.9)
    beside = [tiny.prefill(step, 1, PROMPT[:7])]
    while len(tokens) < COUNT:
        if drafts == "forced":
            known = FORCED[len(tokens) :][:mtp_step]
            step.slots.drafts[2, : len(known)] = torch.tensor(known, dtype=torch.int64)
        new, other = tiny.decode(step, [2, 1])
        tokens += new
        beside += other
        rounds += len(tokens) <= len(FORCED)
    assert tokens[:COUNT] == plain_stream()
    if drafts == "forced":
        assert rounds == (len(FORCED) - 1) // (mtp_step + 1)
    counts = torch.bincount(torch.tensor(tokens), minlength=97)
    assert torch.equal(step.slots.output_counts[2], counts.to(torch.int32))
    alone = tiny.build_step(CONFIG, 0)
    tiny.admit(alone, 1, seed=9, temperature=0.9)
    expected = [tiny.prefill(alone, 1, PROMPT[:7])]
    while len(expected) < len(beside):
        expected += tiny.decode(alone, [1])[0]
    assert beside == expected


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_synthetic_acceptance_keeps_drafts_and_commits_forced_ids(rate: float) -> None:
    step = tiny.build_step(CONFIG, 3, has_forced_ids=True, synthetic_acceptance=rate)
    tokens, sizes = start(step, 1), []
    while len(tokens) < len(FORCED):
        new = tiny.decode(step, [1])[0]
        sizes.append(len(new))
        tokens += new
    assert tokens[: len(FORCED)] == FORCED
    assert set(sizes) == {1 if rate == 0 else 4}
