"""/metrics: the stepping thread keeps sums as plain numbers; a scrape converts them to Prometheus' form."""

from __future__ import annotations

import dataclasses
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from compiled_mtp.request import RequestOutput

if TYPE_CHECKING:
    from compiled_mtp.spec.engine_stats import EngineStats

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

# Sums over requests: names without their prefix, and what each counts.
_SUMS = {
    "prompt_tokens": "prompt tokens of finished requests",
    "cached_prompt_tokens": "prompt tokens taken from the prefix cache",
    "output_tokens": "tokens given to clients",
    "drafted_tokens": "drafts of the MTP head, of finished requests",
    "lookup_drafted_tokens": "drafts from the text of finished requests",
    "lookup_accepted_tokens": "accepted drafts from the text",
    "image_drafted_tokens": "drafts of finished requests with images",
    "image_accepted_tokens": "accepted drafts of those",
}


class _Histogram:
    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def family(self, name: str, text: str) -> HistogramMetricFamily:
        buckets, running = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            running += count
            buckets.append((bound, running))
        return HistogramMetricFamily(name, text, buckets=buckets, sum_value=self.total)


class Metrics(Collector):
    """Counts steps, outputs and answers. The stepping thread calls `on_step`; any thread may call `text`.

    If the engines are in other processes, their outputs go to `count` and their statistics to `set_stats`.
    """

    def __init__(self) -> None:
        self._first_token_s = _Histogram(_SECONDS)
        self._inter_token_s = _Histogram(_SECONDS)
        self._step_s = _Histogram(_SECONDS)
        self._new_tokens = _Histogram(tuple(range(1, 9)))
        self._sums = dict.fromkeys(_SUMS, 0)
        # Drafts of the MTP head by their index in the chain.
        self._accepted: list[int] = []
        self._finished: Counter[str] = Counter()
        self._responses: Counter[tuple[str, int]] = Counter()
        # When each choice last got tokens, by (request id, choice index).
        self._last_s: dict[tuple[str, int], float] = {}
        self._stats: EngineStats | None = None
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def on_step(self, outputs: Sequence[RequestOutput], seconds: float, stats: EngineStats) -> None:
        """Count a step of `seconds` and its outputs."""
        self._step_s.add(seconds)
        self.set_stats(stats)
        self.count(outputs)

    def set_stats(self, stats: EngineStats) -> None:
        """Keep the engine's statistics for the gauges; also called before the first step."""
        self._stats = stats

    def count(self, outputs: Sequence[RequestOutput]) -> None:
        """Count outputs that clients get now."""
        now = time.perf_counter()
        for output in outputs:
            choice, num_new = (output.request_id, output.index), len(output.new_token_ids)
            if num_new:
                self._sums["output_tokens"] += num_new
                last = self._last_s.get(choice)
                if last is None:
                    self._first_token_s.add(output.metrics.time_to_first_token_s or 0.0)
                else:
                    self._inter_token_s.add((now - last) / num_new, num_new)
                    self._new_tokens.add(num_new)
                self._last_s[choice] = now
            if output.finish_reason is not None:
                self._finish(output)

    def fail(self, request_id: str, num_choices: int) -> None:
        """Count `num_choices` choices of a request that ended with an error instead of their last outputs."""
        for choice in [choice for choice in self._last_s if choice[0] == request_id]:
            del self._last_s[choice]
        self._finished["error"] += num_choices

    def on_response(self, path: str, status: int) -> None:
        """Count an answer of the server; `path` must be a route's path, never one that a client made up."""
        self._responses[path, status] += 1

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text form."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]:
        """Yield every metric, as Prometheus' registry asks for them."""
        name = "compiled_mtp_{}".format
        for key, text in _SUMS.items():
            yield CounterMetricFamily(name(key), text, self._sums[key])
        yield self._first_token_s.family(
            name("time_to_first_token_seconds"), "from arrival to the first token"
        )
        yield self._inter_token_s.family(name("inter_token_latency_seconds"), "per token after the first")
        yield self._step_s.family(name("step_seconds"), "one step of the engine")
        yield self._new_tokens.family(name("new_tokens_per_round"), "tokens of one request in one round")
        yield _labelled(
            name("accepted_tokens"),
            "accepted drafts of the MTP head by index",
            "index",
            enumerate(self._accepted, 1),
        )
        yield _labelled(name("requests_finished"), "by reason", "reason", self._finished.items())
        responses = CounterMetricFamily(
            name("responses"), "answers by route and status", labels=["path", "status"]
        )
        for (path, status), count in sorted(self._responses.items()):
            responses.add_metric([path, str(status)], count)
        yield responses
        if (stats := self._stats) is not None:
            used = stats.blocks_used / stats.blocks_total if stats.blocks_total else 0.0
            yield GaugeMetricFamily(name("kv_cache_usage_ratio"), "KV blocks in use / in all", used)
            yield GaugeMetricFamily(name("requests_running"), "requests that are decoded", stats.running)
            yield GaugeMetricFamily(name("requests_waiting"), "requests in the queue", stats.waiting)
            rounds = CounterMetricFamily(
                name("rounds"), "rounds by depth and why they had it", labels=["depth", "why"]
            )
            for depth, counts in stats.rounds_by_depth.items():
                for why, count in counts.items():
                    rounds.add_metric([str(depth), why], count)
            yield rounds
            for field in dataclasses.fields(stats):
                value = getattr(stats, field.name)
                if isinstance(value, int | float):
                    yield GaugeMetricFamily(name(f"engine_{field.name}"), "as Engine.stats() says", value)

    def _finish(self, output: RequestOutput) -> None:
        metrics = output.metrics
        self._last_s.pop((output.request_id, output.index), None)
        self._finished[str(output.finish_reason)] += 1
        accepted, num_drafted = metrics.accepted_by_index, sum(metrics.drafted_by_index)
        self._sums["prompt_tokens"] += metrics.prompt_tokens
        self._sums["cached_prompt_tokens"] += metrics.cached_tokens
        self._sums["drafted_tokens"] += num_drafted
        self._sums["lookup_drafted_tokens"] += metrics.lookup_drafted
        self._sums["lookup_accepted_tokens"] += metrics.lookup_accepted
        self._accepted += [0] * (len(accepted) - len(self._accepted))
        for index, count in enumerate(accepted):
            self._accepted[index] += count
        if metrics.image_tokens:
            self._sums["image_drafted_tokens"] += num_drafted
            self._sums["image_accepted_tokens"] += sum(accepted)


def _labelled(name: str, text: str, label: str, values: object) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=[label])
    for value, count in sorted(values):  # type: ignore[call-overload]
        family.add_metric([str(value)], count)
    return family
