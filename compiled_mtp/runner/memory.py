"""All sizes, resolved once the weights are loaded: blocks, state rows, state snapshots, host memory."""

from __future__ import annotations

import logging
from collections.abc import Collection

from compiled_mtp.graphs.artifacts import read_key
from compiled_mtp.graphs.buckets import prompt_chunk_limit
from compiled_mtp.rounds.prompt_logprobs import SLICE_ROWS
from compiled_mtp.runner.host_tiers import OFFLOAD_SHARE, check_offload, plan_host_memory, prefix_cache_bytes
from compiled_mtp.runner.memory_plan import MemoryPlan, plan_memory
from compiled_mtp.runner.sizes import FLOAT32_BYTES, cache_shape, length_bytes, staging_bytes, vision_bytes
from compiled_mtp.runner.spec import EngineSpec
from compiled_mtp.scheduler.limits import Limits

logger = logging.getLogger(__name__)


def resolve_memory(
    spec: EngineSpec,
    *,
    free_bytes: int,
    host_bytes: int,
    draft_head_bytes: int,
    max_batch: int,
    rounds: Collection[tuple[int, int]],
) -> MemoryPlan:
    """Return the caches that fit into the device's free_bytes and the host's host_bytes.

    Both are this rank's share, the same number on every rank. The device also holds a draft head of
    draft_head_bytes, a slice of a prompt's logits, and buffers that grow with the longest request. max_batch:
    of `resolve_max_batch`; rounds: requests, and rows of each, of the rounds that have programs. Raises
    ValueError as `plan_memory` and `plan_host_memory` do.
    """
    config, is_cpu = spec.config, spec.device.type == "cpu"
    shape = cache_shape(spec)
    # Code is compiled for the caches' shapes: a graph_cache fixes the number of blocks.
    cached = None if spec.cache is None else read_key(spec.cache).get("num_blocks")
    other_bytes = draft_head_bytes + SLICE_ROWS * spec.model_shard.vocab_size * FLOAT32_BYTES
    other_bytes += vision_bytes(spec)
    offload_bytes = 0
    if not is_cpu:
        other_bytes += staging_bytes(config, shape)
    elif config.offload_gb is not None:
        # On a CPU the host tier takes the same memory as the caches.
        offload_bytes = int(config.offload_gb * 2**30) // spec.world
        check_offload(offload_bytes, free_bytes)
    else:
        offload_bytes = int(free_bytes * OFFLOAD_SHARE)
    # No request is longer than the configured blocks, or than the blocks that all free memory would hold.
    num_blocks = config.num_blocks or cached
    most_blocks = num_blocks - 1 if num_blocks else free_bytes // shape.block_bytes(config.block_size)
    longest = min(spec.max_model_len, most_blocks * config.block_size)
    memory = plan_memory(
        int(free_bytes * config.memory_utilization),
        shape,
        block_size=config.block_size,
        max_batch=max_batch,
        max_model_len=spec.max_model_len,
        num_blocks=num_blocks,
        prefix_cache_bytes=prefix_cache_bytes(config, spec.world if is_cpu else 1),
        blocks_per_chunk=config.resume_step // config.block_size,
        host_bytes=offload_bytes,
        other_bytes=other_bytes + length_bytes(spec, longest, max_batch, rounds),
    )
    if memory.max_model_len < spec.max_model_len:
        text = "a request ends after %d tokens instead of %d: %d blocks of %d tokens hold no more"
        counts = memory.num_blocks - 1, config.block_size
        logger.warning(text, memory.max_model_len, spec.max_model_len, *counts)
    return plan_host_memory(spec, memory, host_bytes)


def limits_of(spec: EngineSpec, memory: MemoryPlan) -> Limits:
    """The limits of the engine's scheduler."""
    return Limits(
        max_batch=memory.max_batch,
        num_blocks=memory.num_blocks,
        block_size=spec.config.block_size,
        # The scheduler itself refuses prompts that all blocks cannot hold.
        max_model_len=spec.max_model_len,
        prefill_chunk=spec.prefill_chunk,
        mtp_step=spec.mtp_step,
        max_drafts=spec.max_drafts,
        max_in_flight=spec.max_in_flight,
        host_records=memory.host_records,
        host_blocks=memory.host_blocks,
        num_snapshots=memory.num_snapshots,
        prefix_host_records=memory.prefix_host_records,
        prefix_host_blocks=memory.prefix_host_blocks,
        # Prefill depends on positions alone: a prompt may resume wherever a chunk of its GDN layers ends.
        prefix_step=spec.config.resume_step,
        busy_chunk=spec.busy_chunk,
        least_saved=spec.least_saved,
        max_prompt_chunks=prompt_chunk_limit(spec.prefill_chunk, memory.max_batch),
        prompt_lengths=spec.prompt_lengths,
        wide_requests=spec.wide_requests,
        wide_drafts=spec.wide_drafts,
        given=tuple(
            (shape.verify, spec.given_requests(shape, memory.max_batch)) for shape in spec.given_shapes
        ),
        has_lookup=spec.has_lookup,
        tower=spec.tower,
    )
