"""What the ingress's /metrics tells: the service's own metrics over all replicas, and losses beside them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from compiled_mtp.server.metrics import Metrics

if TYPE_CHECKING:
    from compiled_mtp.engine import EngineStats


class ReplicaMetrics(Metrics):
    """Counts what is delivered by all replicas; `set_replicas` is called every few seconds."""

    def __init__(self) -> None:
        super().__init__()
        self._num_replicas = 0
        self._num_unrouted = 0
        self._num_failovers = 0
        self._num_lost = 0
        # Gauges are there for those who ask before the first look.
        self.set_replicas([], 0)

    def on_failover(self) -> None:
        """A request is begun again on another replica."""
        self._num_failovers += 1

    def on_lost(self) -> None:
        """A request ends for want of a replica."""
        self._num_lost += 1

    def set_replicas(self, stats: Sequence[EngineStats], num_unrouted: int) -> None:
        """Keep what the replicas say of themselves; requests that none has taken yet wait too."""
        self._num_replicas, self._num_unrouted = len(stats), num_unrouted
        total = sum_stats(stats) if stats else _empty_stats()
        self.set_stats(dataclasses.replace(total, waiting=total.waiting + num_unrouted))

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]:
        """Yield every metric, as Prometheus' registry asks for them."""
        yield from super().collect()
        yield from self.collect_own()

    def collect_own(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """Yield the metrics that no replica has."""
        name = "compiled_mtp_{}".format
        yield GaugeMetricFamily(name("replicas"), "replicas that answer", self._num_replicas)
        yield GaugeMetricFamily(
            name("requests_unrouted"), "requests that no replica has taken yet", self._num_unrouted
        )
        yield CounterMetricFamily(
            name("failovers"), "requests begun again on another replica", self._num_failovers
        )
        yield CounterMetricFamily(
            name("requests_lost"), "requests that ended for want of a replica", self._num_lost
        )


def _empty_stats() -> EngineStats:
    """What no engine says of itself."""
    # Waits for torch, as the first stats that a replica sends do.
    from compiled_mtp.engine import EngineStats
    from compiled_mtp.spec.stats import SpeculationStats

    return EngineStats(0, 0, 0, 0, 0, 0, 0, SpeculationStats.empty(0))


def sum_stats(stats: Sequence[EngineStats]) -> EngineStats:
    """Return the sums of what engines, at least one, say of themselves; speculation is the first one's."""
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
