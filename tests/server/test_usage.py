"""What an answer's usage and the metrics count, from outputs alone."""

from __future__ import annotations

from typing import Any

import pytest

from compiled_mtp.request import RequestHistory, RequestMetrics, RequestOutput
from compiled_mtp.request.metrics import LOOKED_UP
from compiled_mtp.server.generation import RoundCounter, Usage
from compiled_mtp.server.metrics import Metrics
from compiled_mtp.spec.engine_stats import EngineStats
from compiled_mtp.spec.stats import SpeculationStats
from tests.server.serving import Stats


def test_drafts_count_what_was_verified() -> None:
    """The engine drafts 3: one round verified 2 and kept 1, the other verified 3 and kept none.

    512 tokens of the prompt were cached.
    """
    history = RequestHistory(600, 0, mtp_step=3, rounds=[2 * 16 + 1, 3 * 16], cached_tokens=512)
    output = RequestOutput("a", [], "", RequestMetrics(history, 2, 3, 0.0), "stop")
    usage, metrics = Usage(600), Metrics()
    usage.add(output)
    assert usage.to_openai()["prompt_tokens_details"] == {"cached_tokens": 512}
    assert usage.to_openai()["speculation"] == {
        "rounds": 2,
        "drafted_tokens": 5,
        "accepted_tokens": 1,
        "lookup_drafted_tokens": 0,
        "lookup_accepted_tokens": 0,
    }
    assert RoundCounter().take(output) == {"drafted": 5, "accepted": 1}
    metrics.on_step([output], 0.1, Stats())  # type: ignore[arg-type]
    assert (metrics._sums["drafted_tokens"], metrics._sums["cached_prompt_tokens"]) == (5, 512)


def test_cached_tokens_are_a_sum_over_prompts() -> None:
    usage = Usage(1200)
    for name, index, cached in (("a", 0, 0), ("b", 0, 512), ("a", 1, 256), ("b", 1, 256)):
        history = RequestHistory(600, 0, mtp_step=3, rounds=[16], cached_tokens=cached)
        usage.add(RequestOutput(name, [], "", RequestMetrics(history, 2, 3, 0.0), "stop", index=index))
    assert usage.to_openai()["prompt_tokens_details"] == {"cached_tokens": 768}


def test_each_choice_is_timed_separately() -> None:
    """Two choices in the same steps: each has a first token, and no time of 0 between its tokens."""
    metrics = Metrics()

    def output(index: int, reason: Any = None) -> RequestOutput:
        history = RequestHistory(5, 0, mtp_step=3, rounds=[16], cached_tokens=0)
        return RequestOutput("a", [7], "x", RequestMetrics(history, 2, 1, 0.0), reason, index=index)

    def told() -> tuple[int, int]:
        return sum(metrics._first_token_s.counts), sum(metrics._inter_token_s.counts)

    for reasons, expected in (((None, None), (2, 0)), ((None, "stop"), (2, 2)), (("stop",), (2, 3))):
        metrics.count([output(index, reason) for index, reason in enumerate(reasons)])
        assert told() == expected
    assert not metrics._last_s
    metrics.count([output(0), output(1), output(0, "stop")])
    metrics.fail("a", 1)
    assert not metrics._last_s


def test_the_tokens_of_a_round_share_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics, now = Metrics(), iter((1.0, 1.4))
    monkeypatch.setattr("compiled_mtp.server.metrics.time.perf_counter", lambda: next(now))
    history = RequestHistory(5, 0, mtp_step=3, rounds=[16], cached_tokens=0)
    for tokens in ([7], [8, 9, 10, 11]):
        metrics.count([RequestOutput("a", tokens, "x", RequestMetrics(history, 2, 5, 0.0), None)])
    times = metrics._inter_token_s
    assert times.total == pytest.approx(0.4)
    assert {bound: n for bound, n in zip(times.bounds, times.counts, strict=False) if n} == {0.1: 4}


def test_drafts_from_the_text_have_counters_of_their_own() -> None:
    history = RequestHistory(5, 0, mtp_step=3, max_drafts=15, rounds=[3 * 16 + 2, LOOKED_UP + 15 * 16 + 9])
    output = RequestOutput("a", [7] * 13, "x", RequestMetrics(history, 2, 14, 0.0), "stop")
    metrics = Metrics()
    metrics.count([output])
    lines = metrics.text().decode().splitlines()
    counts = {"drafted": 3, "lookup_drafted": 15, "lookup_accepted": 9}
    assert {f"compiled_mtp_{name}_tokens_total {float(n)}" for name, n in counts.items()} <= {*lines}
    usage = Usage(prompt_tokens=5)
    usage.add(output)
    assert usage.to_openai()["speculation"] == {
        "rounds": 2,
        "drafted_tokens": 18,
        "accepted_tokens": 11,
        "lookup_drafted_tokens": 15,
        "lookup_accepted_tokens": 9,
    }
    assert RoundCounter().take(output) == {"drafted": 18, "accepted": 11}


def test_metrics_report_memory() -> None:
    names = ("prefix_hits", "prefix_lookups", "prefix_evictions", "prefix_bytes", "cached_tokens")
    names += ("prefix_host_hits", "prefix_host_bytes", "offloads", "recomputes")
    counts = {name: 3 + index for index, name in enumerate(names)}
    metrics = Metrics()
    metrics.set_stats(EngineStats(1, 0, 0, 1, 64, 0, 0, SpeculationStats.empty(3), **counts))  # type: ignore[arg-type]
    lines = metrics.text().decode().splitlines()
    assert {f"compiled_mtp_engine_{name} {float(count)}" for name, count in counts.items()} <= {*lines}
