"""The sizes of the two host tiers: of offloaded requests, and of the prefix cache."""

from __future__ import annotations

import logging
from dataclasses import replace

from compiled_mtp.config import EngineConfig
from compiled_mtp.plan import SPARE_SLOTS
from compiled_mtp.runner.memory_plan import DEFAULT_PREFIX_CACHE_BYTES, MemoryPlan
from compiled_mtp.runner.spec import EngineSpec

logger = logging.getLogger(__name__)

# The share in the host's free memory of offloaded requests, and as much again of the prefix cache's host
# tier, where the config gives no number.
OFFLOAD_SHARE = 0.1
# Tokens of a prompt per state snapshot in the host tier of the prefix cache, at least.
_PREFIX_HOST_TOKENS = 512


def check_offload(offload_bytes: int, free_bytes: int) -> None:
    """Raise ValueError if offload_bytes exceed the host's free_bytes."""
    if offload_bytes > free_bytes:
        raise ValueError(
            f"offload_gb must be at most the {free_bytes / 2**30:.2f} GiB of host memory that are free, got "
            f"{offload_bytes / 2**30:.2f}; lower it"
        )


def plan_host(offload_bytes: int, plan: MemoryPlan, free_bytes: int | None = None) -> tuple[int, int]:
    """Return how many host records and blocks `offload_bytes` of host memory hold: at most as many as `plan`
    has on the device.

    At most half of the bytes go to records. Raises ValueError as `check_offload` does; free_bytes None skips
    the check, for a default.
    """
    if free_bytes is not None:
        check_offload(offload_bytes, free_bytes)
    records = min(plan.num_state_rows - SPARE_SLOTS, offload_bytes // 2 // plan.state_row_bytes)
    blocks = min(plan.num_blocks - 1, (offload_bytes - records * plan.state_row_bytes) // plan.block_bytes)
    return (records, blocks) if records and blocks else (0, 0)


def plan_prefix_host(prefix_tier_bytes: int, plan: MemoryPlan, blocks_per_chunk: int) -> tuple[int, int]:
    """Return how many chunks, and blocks of all of them, `prefix_tier_bytes` of host memory hold: one state
    snapshot and blocks_per_chunk blocks per chunk."""
    chunks = prefix_tier_bytes // (plan.snapshot_bytes + blocks_per_chunk * plan.block_bytes)
    return (chunks, chunks * blocks_per_chunk) if plan.num_snapshots else (0, 0)


def plan_host_memory(spec: EngineSpec, memory: MemoryPlan, free_bytes: int) -> MemoryPlan:
    """Return `memory` with the sizes of both host tiers, which fit this rank's free_bytes of host memory.

    Host memory is allocated when it is first needed. The prefix cache's tier gets what offloaded requests
    leave free, with a warning where that is less than its own share. Raises ValueError if offload_gb exceeds
    free_bytes.
    """
    config = spec.config
    share = int(free_bytes * OFFLOAD_SHARE)
    if config.offload_gb is None:
        records, blocks = plan_host(share, memory)
    else:
        records, blocks = plan_host(int(config.offload_gb * 2**30) // spec.world, memory, free_bytes)
    host_bytes = records * memory.state_row_bytes + blocks * memory.block_bytes
    wanted = prefix_tier_bytes(config, spec.device.type, share, spec.world)
    left = min(wanted, max(free_bytes - host_bytes, 0))
    if left < wanted:
        logger.warning(
            "host memory for offloaded requests (%d MiB, offload_gb) and for the prefix cache (%d MiB) must "
            "fit the %d MiB that are free: the prefix cache gets %d MiB; lower offload_gb or prefix_cache_gb",
            host_bytes >> 20,
            wanted >> 20,
            free_bytes >> 20,
            left >> 20,
        )
    # The blocks of one chunk per state snapshot.
    chunks, prefix_host_blocks = plan_prefix_host(
        left, memory, max(_PREFIX_HOST_TOKENS, config.resume_step) // config.block_size
    )
    prefix_tier_sum = chunks * memory.snapshot_bytes + prefix_host_blocks * memory.block_bytes
    logger.info(
        "host memory on demand: up to %d MiB, %d for offloaded requests and %d for the prefix cache",
        (host_bytes + prefix_tier_sum) >> 20,
        host_bytes >> 20,
        prefix_tier_sum >> 20,
    )
    return replace(
        memory,
        host_records=records,
        host_blocks=blocks,
        prefix_host_records=chunks,
        prefix_host_blocks=prefix_host_blocks,
    )


def prefix_cache_bytes(config: EngineConfig, num_sharing: int = 1) -> int | None:
    """Bytes of the state snapshots of each of num_sharing ranks that share a memory; None for the default."""
    if not config.prefix_cache:
        return 0
    return None if config.prefix_cache_gb is None else int(config.prefix_cache_gb * 2**30) // num_sharing


def prefix_tier_bytes(config: EngineConfig, device_type: str, most_bytes: int, world: int = 1) -> int:
    """Bytes of the host tier of one rank's prefix cache; 0 on a CPU, where it would take the same memory.

    On GPUs all `world` ranks together get as many bytes as state snapshots may take on one device, and each
    rank at most most_bytes; without prefix_cache_gb each rank gets the default.
    """
    if device_type == "cpu":
        return 0
    given = prefix_cache_bytes(config, world)
    return min(DEFAULT_PREFIX_CACHE_BYTES if given is None else given, most_bytes)
