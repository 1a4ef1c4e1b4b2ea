"""What an engine counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from compiled_mtp.request import RequestOutput
from compiled_mtp.spec.depth import Reason
from compiled_mtp.spec.stats import SpeculationStats


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over the requests whose last output was returned to the caller."""

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
    """What the engine holds now, and sums over its lifetime.

    Now: running, waiting, blocks_used of blocks_total (KV blocks of block_size tokens that requests hold),
    prefix_bytes (device memory of the prefix cache) and prefix_host_bytes (host memory of its host tier).
    prefix_lookups counts requests of at least one whole chunk, prefix_hits the ones that resumed after a
    cached prefix, prefix_host_hits the ones that resumed from the host tier; prefix_evictions counts evicted
    state snapshots. offloads and recomputes count preemptions for lack of blocks: to host memory, or back to
    the queue with tokens to compute again. rounds_by_depth, empty unless mtp_step is "auto", counts the
    batch's rounds by depth and then by reason: "best", "probe", "retry" or "only" (no other depth was ready).
    images: those that the vision tower has encoded. The other fields sum over finished requests,
    image_speculation over those with images, which speculation counts too. No speculation counts requests
    whose output was given.
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
