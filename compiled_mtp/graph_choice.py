"""Whether steps are compiled, and how they become CUDA graphs, where the config leaves it open."""

from __future__ import annotations

import logging

import torch

from compiled_mtp.config import EngineConfig
from compiled_mtp.graphs.artifacts import read_key
from compiled_mtp.graphs.compile import GraphMode

logger = logging.getLogger(__name__)

# Of a model whose steps are long enough for "reduce-overhead". Its bookkeeping takes the host 0.2 to 0.65 ms
# a step; the smallest released model, 1.5 GB, loses 0.5 % to it, and one of a few MB half its speed.
_LEAST_TREE_BYTES = 1 << 30


def choose_compiled(config: EngineConfig, device: torch.device) -> bool:
    """Whether steps are compiled: a newcomer's first run on a CPU starts at once, uncompiled."""
    if config.compile != "auto":
        return config.compile == "on"
    if device.type != "cpu" or config.graph_cache is not None:
        return True
    # Whoever chose a graph mode or shapes to compile wanted compiled code.
    is_wanted = config.graph_mode != "auto" or config.batch_sizes is not None
    logger.log(
        logging.WARNING if is_wanted else logging.INFO,
        "running uncompiled: on a CPU compile=auto takes only what a graph_cache holds: set compile=on",
    )
    return False


def choose_graph_mode(config: EngineConfig, device: torch.device, weight_bytes: int) -> GraphMode | None:
    """How compiled steps become CUDA graphs; None on a CPU, which has none.

    "auto" is what a graph_cache was made for; without one torch's CUDA-graph trees, where a step is long
    enough to hide what they do between two of them.
    """
    if device.type == "cpu":
        return None
    if config.graph_mode != "auto":
        return config.graph_mode
    if config.graph_cache is not None:
        stored: GraphMode = read_key(config.graph_cache).get("graph_mode", "replay")
        return stored
    return "reduce-overhead" if weight_bytes >= _LEAST_TREE_BYTES else "replay"
