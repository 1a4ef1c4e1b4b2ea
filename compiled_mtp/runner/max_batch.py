"""How many requests decode together, and how many drafts of the text their rounds verify."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from compiled_mtp.config.engine_config import DEFAULT_BATCH, DEFAULT_GPU_BATCH
from compiled_mtp.graphs.artifacts import read_key
from compiled_mtp.graphs.buckets import RoundShape
from compiled_mtp.plan import SPARE_SLOTS
from compiled_mtp.runner.memory_plan import DEFAULT_PREFIX_CACHE_BYTES, PREFIX_CACHE_SHARE
from compiled_mtp.runner.sizes import CacheShape, cache_shape, length_bytes
from compiled_mtp.runner.spec import EngineSpec

logger = logging.getLogger(__name__)

# Tokens of each request for which the default max_batch leaves room.
_TOKENS_EACH = 4096
# The drafts of wide rounds that an engine may have, and the largest share that the longer rings of its slots
# may take of the memory that is left for blocks.
_WIDE_DRAFTS, _WIDE_SHARE = (15, 7, 3), 1 / 16
# A default above this many requests takes at most a share of the free memory for what only many need: their
# state rows and attention's partial results. Few long texts must not lose their blocks to it.
_MANY_REQUESTS, _MANY_SHARE = 32, 1 / 4


def resolve_max_batch(spec: EngineSpec, free_bytes: int) -> int:
    """Return the config's max_batch, or its default: the graph_cache's number, or as many as the device's
    free_bytes hold."""
    config = spec.config
    if config.max_batch is not None:
        return config.max_batch
    if spec.cache is not None:
        return int(read_key(spec.cache)["max_batch"])
    least = max(DEFAULT_BATCH, *(config.batch_sizes or ()), 0)
    if spec.device.type == "cpu":
        return least
    # Only larger batches are compared with memory; the least is taken as it is.
    shape, rows = cache_shape(spec.narrow(0)), spec.mtp_step + 1
    longest = min(spec.max_model_len, free_bytes // shape.block_bytes(config.block_size) * config.block_size)
    fits = default_max_batch(
        int(free_bytes * config.memory_utilization),
        shape,
        block_size=config.block_size,
        max_model_len=spec.max_model_len,
        num_blocks=config.num_blocks,
        scratch_bytes=lambda batch: length_bytes(spec, longest, batch, [(batch, rows)]),
    )
    return max(fits, least)


def fit_wide_rounds(spec: EngineSpec, max_batch: int, free_bytes: int) -> EngineSpec:
    """Return the spec whose wide rounds verify as many drafts as the rings of max_batch slots have room for.

    Rings may be longer than a chain needs if that takes at most _WIDE_SHARE of what the slots leave of the
    device's free_bytes. A graph_cache has its own wide rounds.
    """
    config = spec.config
    if not spec.wide_shapes:
        return spec
    if spec.cache is not None:
        stored = read_key(spec.cache)["wide_shapes"]
        return replace(spec, wide_shapes=tuple(RoundShape(*shape) for shape in stored))
    slots, least = max_batch + SPARE_SLOTS, cache_shape(spec.narrow(0))
    left = int(free_bytes * config.memory_utilization) - slots * least.state_row_bytes
    left -= (config.num_blocks or 0) * least.block_bytes(config.block_size)

    def fits(wide: EngineSpec) -> bool:
        more_bytes = slots * (cache_shape(wide).state_row_bytes - least.state_row_bytes)
        return more_bytes <= max(_WIDE_SHARE * left, 0)

    fitted = next(wide for wide in map(spec.narrow, (*_WIDE_DRAFTS, 0)) if fits(wide))
    if fitted.wide_shapes != spec.wide_shapes:
        text = "a round verifies at most %d drafts from the text; with a lower max_batch it verifies up to %d"
        logger.info(text, max(fitted.wide_drafts, spec.mtp_step), spec.wide_drafts)
    return fitted


def default_max_batch(
    free_bytes: int,
    shape: CacheShape,
    *,
    block_size: int,
    max_model_len: int,
    num_blocks: int | None = None,
    scratch_bytes: Callable[[int], int] = lambda batch: 0,
) -> int:
    """Return the largest of 256, 128, ... 8 requests whose caches fit into `free_bytes`; 8 if none does.

    Each request counts with a state row and the blocks of _TOKENS_EACH tokens, or of max_model_len if that is
    less; num_blocks replaces the blocks of all. State snapshots keep their default share. For more than
    _MANY_REQUESTS, their state rows and scratch_bytes together take at most _MANY_SHARE of `free_bytes`.
    """
    room = free_bytes - min(DEFAULT_PREFIX_CACHE_BYTES, int(free_bytes * PREFIX_CACHE_SHARE))
    blocks_each = -(-min(max_model_len, _TOKENS_EACH) // block_size)
    batch = DEFAULT_GPU_BATCH
    while batch > DEFAULT_BATCH:
        blocks = num_blocks or batch * blocks_each + 1
        rows_bytes = (batch + SPARE_SLOTS) * shape.state_row_bytes
        blocks_bytes, most_bytes = blocks * shape.block_bytes(block_size), room
        if batch > _MANY_REQUESTS:
            rows_bytes += scratch_bytes(batch)
            most_bytes = min(room, blocks_bytes + int(_MANY_SHARE * free_bytes))
        if rows_bytes + blocks_bytes <= most_bytes:
            break
        batch //= 2
    return batch
