"""The ingress's /metrics: the service's metrics over all replicas, and counts of lost replicas."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from compiled_mtp.server.metrics import Metrics

if TYPE_CHECKING:
    from compiled_mtp.spec.engine_stats import EngineStats


class ReplicaMetrics(Metrics):
    """Counts what all replicas deliver; the ingress calls `set_replicas` every few seconds."""

    def __init__(self) -> None:
        super().__init__()
        self._num_replicas = 0
        self._num_unrouted = 0
        self._num_failovers = 0
        self._num_lost = 0
        # /metrics has the gauges before the first poll of the replicas.
        self.set_replicas([], 0)

    def on_failover(self) -> None:
        """Count a request that restarts on another replica."""
        self._num_failovers += 1

    def on_lost(self) -> None:
        """Count a request that ends because no replica decodes it."""
        self._num_lost += 1

    def set_replicas(self, stats: Sequence[EngineStats], num_unrouted: int) -> None:
        """Set the gauges from the replicas' stats; requests that no replica has accepted count as waiting."""
        self._num_replicas, self._num_unrouted = len(stats), num_unrouted
        total = sum_stats(stats) if stats else _empty_stats()
        self.set_stats(dataclasses.replace(total, waiting=total.waiting + num_unrouted))

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]:
        """Yield every metric, for Prometheus' registry."""
        yield from super().collect()
        yield from self.collect_own()

    def collect_own(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """Yield the metrics that only the ingress has."""
        name = "compiled_mtp_{}".format
        yield GaugeMetricFamily(name("replicas"), "replicas that answer", self._num_replicas)
        yield GaugeMetricFamily(
            name("requests_unrouted"), "requests that no replica has accepted yet", self._num_unrouted
        )
        yield CounterMetricFamily(
            name("failovers"), "requests restarted on another replica", self._num_failovers
        )
        yield CounterMetricFamily(
            name("requests_lost"), "requests that ended because no replica decoded them", self._num_lost
        )


def _empty_stats() -> EngineStats:
    """Return the stats of no engine: zeros."""
    # Imported here: it imports torch, as unpickling a replica's first stats does.
    from compiled_mtp.spec.engine_stats import EngineStats
    from compiled_mtp.spec.stats import SpeculationStats

    return EngineStats(0, 0, 0, 0, 0, 0, 0, SpeculationStats.empty(0))


def sum_stats(stats: Sequence[EngineStats]) -> EngineStats:
    """Return the sums of the stats of one engine or more; `speculation` is the first engine's."""
    first = stats[0]
    fields: dict[str, Any] = {
        field.name: sum(getattr(one, field.name) for one in stats)
        for field in dataclasses.fields(first)
        if isinstance(getattr(first, field.name), int | float)
    }
    rounds: dict[int, Mapping[Any, int]] = {}
    for one in stats:
        for depth, counts in one.rounds_by_depth.items():
            rounds[depth] = dict(Counter(rounds.get(depth, {})) + Counter(counts))
    return dataclasses.replace(first, **fields, rounds_by_depth=rounds)
