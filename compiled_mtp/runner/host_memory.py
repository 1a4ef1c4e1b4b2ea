"""How much of the host's memory an engine may take beside a device's: for requests that leave, and for what
the prefix cache gives up."""

from __future__ import annotations

import logging
from typing import NamedTuple

from compiled_mtp.config import EngineConfig
from compiled_mtp.runner.cache_sizes import shelf_bytes
from compiled_mtp.runner.memory import HostPlan, MemoryPlan, plan_host, plan_shelf

logger = logging.getLogger(__name__)

OFFLOAD_SHARE = 0.1
"""Of the host's free memory, for each of the two where nobody says otherwise."""
# Of a prompt, for each state that the prefix cache keeps in host memory.
_SHELF_TOKENS = 512


class HostPlans(NamedTuple):
    """Room for requests that leave the device, and for what the prefix cache gives up there."""

    host: HostPlan
    shelf: HostPlan


def plan_host_memory(
    config: EngineConfig,
    device_type: str,
    memory: MemoryPlan,
    free_bytes: int,
    world: int = 1,
) -> HostPlans:
    """Divide the free_bytes of the host that are free now; what is planned is taken when it is first needed.

    free_bytes are those of one of `world` ranks, which has its share of offload_gb and prefix_cache_gb.

    What the prefix cache gives up has what requests leave it, with a warning where that is less than its
    own share. Raises ValueError if offload_gb is more than there is.
    """
    share = int(free_bytes * OFFLOAD_SHARE)
    if config.offload_gb is None:
        host = plan_host(share, memory)
    else:
        host = plan_host(int(config.offload_gb * 2**30) // world, memory, free_bytes)
    host_bytes = host.num_records * memory.state_row_bytes + host.num_blocks * memory.block_bytes
    wanted = shelf_bytes(config, device_type, share, world)
    left = min(wanted, max(free_bytes - host_bytes, 0))
    if left < wanted:
        logger.warning(
            "host memory for requests that leave (%d MiB, offload_gb) and for the prefix cache (%d MiB) must "
            "fit the %d MiB that are free: the prefix cache gets %d MiB; lower offload_gb or prefix_cache_gb",
            host_bytes >> 20,
            wanted >> 20,
            free_bytes >> 20,
            left >> 20,
        )
    # A launch's worth of blocks to a state.
    shelf = plan_shelf(left, memory, max(_SHELF_TOKENS, config.resume_step) // config.block_size)
    shelf_sum = shelf.num_records * memory.checkpoint_bytes + shelf.num_blocks * memory.block_bytes
    logger.info(
        "up to %d MiB of the host's memory when they are needed: %d for requests that leave, %d for the "
        "prefix cache",
        (host_bytes + shelf_sum) >> 20,
        host_bytes >> 20,
        shelf_sum >> 20,
    )
    return HostPlans(host, shelf)
