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
    is_wanted = config.graph_mode not in ("auto", "off") or config.batch_sizes is not None
    logger.log(
        logging.WARNING if is_wanted else logging.INFO,
        "running uncompiled: on a CPU compile=auto takes only what a graph_cache holds: set compile=on",
    )
    return False


def has_graphs(config: EngineConfig, device: torch.device) -> bool:
    """Whether steps become CUDA graphs, compiled or not.

    An operator's reference may read values on the host, which no graph can: "auto" leaves graphs out then.
    """
    if config.graph_mode == "auto" and config.reference_ops:
        return False
    return device.type != "cpu" and config.graph_mode != "off"


def choose_graph_mode(
    config: EngineConfig, device: torch.device, weight_bytes: int, *, is_compiled: bool
) -> GraphMode | None:
    """How steps become CUDA graphs; None where they do not.

    "auto" is what a graph_cache was made for; without one torch's CUDA-graph trees, where a step is long
    enough to hide what they do between two of them. What is not compiled is captured by hand.
    """
    if not has_graphs(config, device):
        return None
    if not is_compiled:
        return "replay"
    if config.graph_mode != "auto":
        assert config.graph_mode != "off"
        return config.graph_mode
    if config.graph_cache is not None:
        stored: GraphMode | None = read_key(config.graph_cache).get("graph_mode", "replay")
        return stored
    return "reduce-overhead" if weight_bytes >= _LEAST_TREE_BYTES else "replay"
