"""What rounds of one depth predict of others: where drafts fail depends on where rounds begin."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_mtp.spec.gains import Gains

DEPTHS = (0, 1, 2, 3, 5)
# Correct drafts from each position, of the shipped checkpoint's text with the worst predictions.
IN_STEP = [0] + [5] * 6


def kept_by_round(text: list[int], depth: int, rounds: int) -> list[int]:
    """Return the kept drafts of rounds of a fixed depth over a text that repeats."""
    found, at = [], 0
    for _ in range(rounds):
        found.append(min(depth, text[at % len(text)]))
        at += found[-1] + 1
    return found


def taught(kept: list[int], num_drafts: int, requests: int = 1) -> Gains:
    """Return Gains that learnt from such rounds, eight at a time, of equal requests."""
    gains = Gains(DEPTHS)
    for begin in range(0, len(kept), 8):
        gains.learn(num_drafts, [[[0] * (one + 1)] * requests for one in kept[begin : begin + 8]])
    return gains


@pytest.mark.parametrize("requests", [1, 8])
def test_rounds_in_step_with_a_text_predict_other_depths(requests: int) -> None:
    """By draft number, depth 3 would give 2.5 tokens per round."""
    kept = {depth: kept_by_round(IN_STEP, depth, 200) for depth in (3, 5)}
    means = {depth: 1 + sum(of) / 200 for depth, of in kept.items()}
    assert means[3] == pytest.approx(3.5, abs=0.02)
    assert means[5] == pytest.approx(3.5, abs=0.02)
    tokens = dict(zip(DEPTHS, taught(kept[5], 5, requests).tokens(), strict=True))
    assert tokens[0] == 1
    assert tokens[5] == pytest.approx(means[5], rel=0.03)
    assert tokens[3] == pytest.approx(means[3], rel=0.08)


@pytest.mark.parametrize(("num_drafts", "rate"), [(1, 0.3), (3, 0.6), (5, 0.9), (3, 0.0), (3, 1.0)])
def test_drafts_that_fail_by_chance_are_predicted_too(num_drafts: int, rate: float) -> None:
    chance, found = random.Random(0), []
    for _ in range(4000):
        found.append(next((k for k in range(num_drafts) if chance.random() >= rate), num_drafts))
    gains = Gains(DEPTHS)
    total = [0.0] * len(DEPTHS)
    for begin in range(0, len(found), 8):
        gains.learn(num_drafts, [[[0] * (one + 1)] for one in found[begin : begin + 8]])
        total = [old + new for old, new in zip(total, gains.tokens(), strict=True)]
    for depth, of in zip(DEPTHS, total, strict=True):
        expected = sum(rate**k for k in range(depth + 1))
        # An estimate follows few rounds; the mean covers all.
        assert of / 500 == pytest.approx(expected, rel=0.06)


@given(
    num_drafts=st.sampled_from(DEPTHS[1:]),
    lengths=st.lists(st.lists(st.integers(0, 6), min_size=3, max_size=3), min_size=1, max_size=10),
)
@settings(max_examples=30, deadline=None)
def test_replays_of_the_depth_that_ran_are_its_rounds_and_no_round_is_longer_than_it_can_be(
    num_drafts: int, lengths: list[list[int]]
) -> None:
    rounds = [[[0] * min(length, num_drafts + 1) for length in row] for row in lengths]
    gains = Gains(DEPTHS)
    gains.learn(num_drafts, rounds)
    counts = [len(new) for row in rounds for new in row]
    tokens = sum(counts)
    assert gains._tokens == tokens
    assert gains._ended[DEPTHS.index(num_drafts) - 1] == len(counts) - counts.count(0)
    for depth, ended in zip(DEPTHS[1:], gains._ended, strict=True):
        # One round of each request is still open.
        assert (depth + 1) * (ended + 3) >= tokens
    # Deeper depths have fewer rounds, apart from the open ones.
    assert gains._ended == sorted(gains._ended, reverse=True)


def test_requests_that_come_and_go_leave_what_was_learnt() -> None:
    gains = taught(kept_by_round(IN_STEP, 5, 64), 5)
    gains.learn(5, [[[1], [1, 2]], [[1]], []])
    gains.learn(5, [[]])
    gains.learn(0, [[[1]]] * 8)
    gains.use((0, 1, 2, 3, 5, 7))
    gains.learn(7, [[[0] * 8]])
    assert len(gains.tokens()) == 6
