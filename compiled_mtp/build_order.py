"""What a runner's device side is asked for beside its config. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Features:
    """What a runner can do that EngineConfig does not ask for.

    depths: the numbers of drafts that a round may verify or leave, in any pair; if empty, those of the
    config, of which a round verifies and leaves the same. Without fixed shapes, any pair up to the deepest.
    with_halves: rounds that run as two halves are made ready too. with_drafts: results carry the next round's
    drafts. host_records, host_blocks: room for requests, and blocks, in host memory, whatever offload_gb is.
    save_to: a directory that does not exist yet, into which every compiled program is written, for a
    graph_cache.
    """

    depths: tuple[int, ...] = ()
    with_halves: bool = False
    with_drafts: bool = False
    host_records: int = 0
    host_blocks: int = 0
    save_to: Path | None = None
