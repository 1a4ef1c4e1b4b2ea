"""The ratios of drafting, counted over verify rounds."""

from __future__ import annotations

import pytest

from compiled_mtp.request import Request, RequestMetrics, SamplingParams
from compiled_mtp.spec.stats import SpeculationStats


def metrics(output_tokens: int, rounds_by_accepted: list[int]) -> RequestMetrics:
    return RequestMetrics(
        prompt_tokens=5, seed=0, output_tokens=output_tokens, rounds_by_accepted=rounds_by_accepted
    )


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
    request.metrics.rounds_by_accepted = [0, 0, 0, 0]
    request.append([10], is_round=False, now_s=0.0)
    request.append([11], is_round=True, now_s=0.0)
    request.append([12, 13, 14, 15], is_round=True, now_s=0.0)
    stats = SpeculationStats.empty(3).plus(request.metrics)
    assert request.output_token_ids == [10, 11, 12, 13]
    assert stats.mean_new_tokens == 1.5
    assert stats.accepted_by_index == (1, 1, 0)
