"""The ratios of drafting, counted over verify rounds."""

from __future__ import annotations

import pytest

from compiled_mtp.request import Request, RequestHistory, RequestMetrics, SamplingParams
from compiled_mtp.spec.stats import SpeculationStats


def metrics(output_tokens: int, rounds_by_accepted: list[int], drafted: int | None = None) -> RequestMetrics:
    """Return the metrics of rounds that all verified `drafted` drafts, by default mtp_step."""
    most = len(rounds_by_accepted) - 1
    pairs = [
        (most if drafted is None else drafted) * 16 + kept
        for kept, count in enumerate(rounds_by_accepted)
        for _ in range(count)
    ]
    history = RequestHistory(prompt_tokens=5, seed=0, mtp_step=most, rounds=pairs)
    return RequestMetrics(history, len(pairs), output_tokens, 0.0)


def test_ratios_count_verify_rounds_alone() -> None:
    stats = SpeculationStats.empty(2).plus(metrics(8, [2, 1, 1])).plus(metrics(4, [0, 0, 1]))
    assert (stats.rounds, stats.round_tokens, stats.accepted_by_index) == (5, 10, (3, 2))
    assert stats.mean_new_tokens == 2.0
    assert stats.acceptance_rate == 0.5
    assert stats.acceptance_by_index == (0.6, 0.4)


@pytest.mark.parametrize("output_tokens", [0, 1])
def test_a_request_without_a_round_adds_nothing(output_tokens: int) -> None:
    stats = SpeculationStats.empty(3).plus(metrics(output_tokens, [0, 0, 0, 0]))
    assert stats == SpeculationStats.empty(3)
    assert (stats.mean_new_tokens, stats.acceptance_rate) == (0.0, 0.0)
    assert stats.acceptance_by_index == (0.0, 0.0, 0.0)


def test_plain_decode_proposes_nothing() -> None:
    stats = SpeculationStats.empty(0).plus(metrics(5, [4]))
    assert (stats.mean_new_tokens, stats.acceptance_rate, stats.acceptance_by_index) == (1.0, 0.0, ())


def test_tokens_past_a_stop_do_not_count() -> None:
    request = Request("r", [1], SamplingParams(max_tokens=4))
    request.history.mtp_step = 3
    request.append([10], num_drafts=None, now_s=0.0)
    request.append([11], num_drafts=3, now_s=0.0)
    request.append([12, 13, 14, 15], num_drafts=3, now_s=0.0)
    stats = SpeculationStats.empty(3).plus(request.metrics)
    assert request.output_token_ids == [10, 11, 12, 13]
    assert stats.mean_new_tokens == 1.5
    assert stats.accepted_by_index == (1, 1, 0)


def test_rounds_of_several_depths_are_rated_by_the_drafts_they_had() -> None:
    stats = SpeculationStats.empty(3).plus(metrics(7, [1, 1, 0, 1])).plus(metrics(4, [1, 1, 0, 0], drafted=1))
    stats = stats.plus(metrics(3, [2, 0, 0, 0], drafted=0))
    assert (stats.rounds, stats.drafted_by_index, stats.accepted_by_index) == (7, (5, 3, 3), (3, 1, 1))
    assert stats.acceptance_by_index == (3 / 5, 1 / 3, 1 / 3)
    assert stats.acceptance_rate == 5 / 11


def test_metrics_do_not_change_while_the_request_goes_on() -> None:
    request = Request("r", [1], SamplingParams(max_tokens=9))
    request.history.mtp_step = 3
    before = request.metrics
    request.append([10], num_drafts=None, now_s=request.arrival_s + 1)
    first = request.metrics
    request.append([11, 12], num_drafts=2, now_s=request.arrival_s + 3)
    request.append([13], num_drafts=0, now_s=request.arrival_s + 4)
    assert (before.output_tokens, before.rounds, before.time_to_first_token_s) == (0, 0, None)
    assert (first.output_tokens, first.rounds_by_accepted) == (1, [0, 0, 0, 0])
    assert first.time_to_first_token_s == first.total_s == pytest.approx(1.0)
    assert request.metrics.rounds_by_accepted == [1, 1, 0, 0]
    assert request.metrics.drafted_by_index == [1, 1, 0]
    assert request.metrics.total_s == pytest.approx(4.0)
    with pytest.raises(AttributeError):
        first.output_tokens = 5  # type: ignore[misc]


def test_looked_up_drafts_are_counted_apart_from_a_chains() -> None:
    request = Request("r", [1], SamplingParams(max_tokens=40))
    request.history.mtp_step, request.history.max_drafts = 2, 15
    request.append([10], num_drafts=None, now_s=0.0)
    request.append([11, 12], num_drafts=2, now_s=0.0)
    request.append([*range(20, 33)], num_drafts=15, now_s=0.0, is_looked_up=True)
    request.append([40], num_drafts=2, now_s=0.0, is_looked_up=True)
    # A wide round verifies id 0 behind a chain's drafts; it was right here.
    request.append([41, 42, 0, 0], num_drafts=2, now_s=0.0)
    own = request.metrics
    assert (own.drafted, own.accepted) == (2 + 15 + 2 + 3, 1 + 12 + 0 + 3)
    assert (own.lookup_rounds, own.lookup_drafted, own.lookup_accepted) == (2, 17, 12)
    assert own.rounds_by_accepted == [1, 1, 0, 1, *[0] * 8, 1, 0, 0, 0]
    stats = SpeculationStats.empty(2).plus(own)
    assert (stats.accepted_by_index, stats.drafted_by_index) == ((2, 1), (2, 2))
    assert (stats.lookup_rounds, stats.lookup_accepted, stats.lookup_drafted) == (2, 12, 17)
    assert stats.mean_new_tokens == 20 / 4
