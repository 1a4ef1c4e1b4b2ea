"""Which depths of rounds a start does not compile. No torch."""

from __future__ import annotations

from compiled_mtp.config import EngineConfig
from compiled_mtp.spec.depth import first_depth


def further_depths(config: EngineConfig, *, is_compiled: bool) -> tuple[int, ...]:
    """The depths that a start does not compile: 0 first, since nothing is slower than it."""
    if config.mtp_step != "auto" or not is_compiled:
        return ()
    return tuple(depth for depth in config.depths if depth != first_depth(config.depths))
