"""What an engine counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from compiled_mtp.request import RequestOutput
from compiled_mtp.spec.depth import Reason
from compiled_mtp.spec.stats import SpeculationStats


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over finished requests: those with a last output that the caller has."""

    finished: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    speculation: SpeculationStats
    image_tokens: int
    image_speculation: SpeculationStats

    def plus(self, output: RequestOutput) -> Totals:
        metrics = output.metrics
        is_drafted = not metrics.history.is_given
        is_seen = is_drafted and metrics.image_tokens > 0
        return Totals(
            self.finished + 1,
            self.prompt_tokens + metrics.prompt_tokens,
            self.cached_tokens + metrics.cached_tokens,
            self.output_tokens + metrics.output_tokens,
            self.speculation.plus(metrics) if is_drafted else self.speculation,
            self.image_tokens + metrics.image_tokens,
            self.image_speculation.plus(metrics) if is_seen else self.image_speculation,
        )


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine's current state, and sums over its lifetime.

    Now: running and waiting requests; blocks_used of blocks_total (KV blocks of block_size tokens);
    prefix_bytes and prefix_host_bytes, the device and host memory that the prefix cache uses.

    Over the lifetime: prefix_lookups counts requests of at least one whole chunk, prefix_hits those that
    resumed from the prefix cache, prefix_host_hits those that resumed from its host tier, prefix_evictions
    evicted state snapshots. offloads and recomputes count preemptions for lack of blocks, to host memory or
    back to the queue. rounds_by_depth, empty unless mtp_step is "auto", counts rounds by depth and then by
    reason: "best", "probe", "retry" or "only" (no other depth was ready). images counts encoded images.

    The other fields are sums over finished requests, image_speculation over those with images. speculation
    and image_speculation leave out requests with a given output.
    """

    running: int
    waiting: int
    finished: int
    blocks_used: int
    blocks_total: int
    prompt_tokens: int
    output_tokens: int
    speculation: SpeculationStats
    rounds_by_depth: Mapping[int, Mapping[Reason, int]] = field(default_factory=dict)
    cached_tokens: int = 0
    prefix_hits: int = 0
    prefix_lookups: int = 0
    prefix_evictions: int = 0
    prefix_bytes: int = 0
    prefix_host_hits: int = 0
    prefix_host_bytes: int = 0
    offloads: int = 0
    recomputes: int = 0
    images: int = 0
    image_tokens: int = 0
    image_speculation: SpeculationStats | None = None
