"""Which depths rounds have, and when their programs are made ready. No torch."""

from __future__ import annotations

from itertools import product

from compiled_mtp.build_order import Features
from compiled_mtp.config import EngineConfig
from compiled_mtp.spec.depth import first_depth


def depth_pairs(config: EngineConfig, features: Features, *, has_shapes: bool) -> tuple[tuple[int, int], ...]:
    """Pairs of drafts that a round verifies and leaves; without fixed shapes any up to the deepest."""
    if has_shapes and not features.depths:
        return tuple((depth, depth) for depth in config.depths)
    every = sorted({*features.depths}) if has_shapes else range(max(features.depths or config.depths) + 1)
    return tuple(product(every, every))


def further_depths(config: EngineConfig, *, is_compiled: bool) -> tuple[int, ...]:
    """The depths that a start does not compile: 0 first, since nothing is slower than it."""
    if config.mtp_step != "auto" or not is_compiled:
        return ()
    return tuple(depth for depth in config.depths if depth != first_depth(config.depths))
