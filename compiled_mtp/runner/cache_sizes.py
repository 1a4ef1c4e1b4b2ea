"""What a model and its configuration say about the sizes of caches, and of what lies beside them."""

from __future__ import annotations

import torch

from compiled_mtp.cache.host_tier import blocks_in_segment
from compiled_mtp.cache.kv_cache import KV_SCALE_BYTES
from compiled_mtp.cache.slot_state import sampling_bytes
from compiled_mtp.cache.state_cache import ring_length
from compiled_mtp.config import EngineConfig
from compiled_mtp.model_config import ModelConfig
from compiled_mtp.ops.paged_attention.splits import count_splits
from compiled_mtp.plan import SPARE_SLOTS
from compiled_mtp.runner.memory import DEFAULT_PREFIX_CACHE_BYTES, CacheShape


def cache_shape(model: ModelConfig, dtype: torch.dtype, kv_dtype: torch.dtype, mtp_step: int) -> CacheShape:
    """What decides the bytes of a request: activations of `dtype`, pages of kv_dtype, mtp_step drafts."""
    return CacheShape(
        num_attention_layers=model.num_attention_layers + (mtp_step > 0),
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        kv_bytes=kv_dtype.itemsize,
        num_gdn_layers=model.num_gdn_layers,
        num_key_heads=model.linear_num_key_heads,
        num_value_heads=model.linear_num_value_heads,
        key_head_dim=model.linear_key_head_dim,
        value_head_dim=model.linear_value_head_dim,
        conv_dim=model.linear_conv_dim,
        conv_bytes=dtype.itemsize,
        ring_length=ring_length(mtp_step, model.conv_kernel),
        kv_scale_bytes=0 if kv_dtype == dtype else KV_SCALE_BYTES,
        sampling_bytes=sampling_bytes(model.vocab_size),
        hidden_bytes=model.hidden_size * dtype.itemsize,
    )


def prefix_cache_bytes(config: EngineConfig, num_sharing: int = 1) -> int | None:
    """Bytes for checkpoints of each of the ranks that share a memory; None for the default."""
    if not config.prefix_cache:
        return 0
    return None if config.prefix_cache_gb is None else int(config.prefix_cache_gb * 2**30) // num_sharing


def shelf_bytes(config: EngineConfig, device_type: str, most_bytes: int, world: int = 1) -> int:
    """Bytes of host memory for what the prefix cache of each of `world` ranks gives up: on GPUs for all as
    many as checkpoints may take on one, but at most most_bytes each; on a CPU none, which is the same memory.
    """
    if device_type == "cpu":
        return 0
    given = prefix_cache_bytes(config, world)
    return min(DEFAULT_PREFIX_CACHE_BYTES if given is None else given, most_bytes)


def staging_bytes(config: EngineConfig, shape: CacheShape) -> int:
    """Bytes of the buffers in which a GPU packs what goes to host memory and comes from there."""
    block_bytes = shape.block_bytes(config.block_size)
    segment = blocks_in_segment(block_bytes) * block_bytes
    leaving = 0 if config.offload_gb == 0 else max(shape.state_row_bytes(), segment)
    return leaving + (max(shape.checkpoint_bytes(), segment) if config.prefix_cache else 0)


def length_bytes(
    config: EngineConfig, model: ModelConfig, device_type: str, longest: int, most_rows: int
) -> int:
    """Bytes that grow with the longest request: rotary table, block tables, and on a GPU what attention's
    splits leave of up to most_rows rows; one layer after the other has that.
    """
    tables = longest * model.rotary_dim * torch.float32.itemsize
    tables += (
        (config.max_batch + SPARE_SLOTS + most_rows) * -(-longest // config.block_size) * torch.int32.itemsize
    )
    if device_type == "cpu":
        return tables
    parts = count_splits(longest) * most_rows * model.num_q_heads
    return tables + parts * (model.head_dim + 2) * torch.float32.itemsize
