"""How many bytes a request's caches and the buffers beside them take."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from compiled_mtp.cache.host_tier import blocks_in_segment
from compiled_mtp.cache.kv_cache import KV_SCALE_BYTES
from compiled_mtp.cache.slot_state import sampling_bytes
from compiled_mtp.cache.state_cache import ring_length
from compiled_mtp.config import EngineConfig
from compiled_mtp.ops.paged_attention.splits import count_partials
from compiled_mtp.plan import SPARE_SLOTS
from compiled_mtp.runner.spec import EngineSpec
from compiled_mtp.vision.tower import tower_bytes

_INT16_BYTES = 2
_INT32_BYTES = 4
FLOAT32_BYTES = 4
# Bytes to whose multiples `RowLayout` rounds a row of packed tensors.
_ROW_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class CacheShape:
    """How many bytes a rank's caches take.

    token_bytes: of one token in all layers: keys, values, scales and experts. state_row_bytes: of one
    request: float32 states and ring entries of the GDN layers, raw conv inputs, sampling tables, what
    drafters keep. snapshot_bytes: of a state snapshot: the states, conv inputs and hidden state that the next
    chunk reads.
    """

    token_bytes: int
    state_row_bytes: int
    snapshot_bytes: int

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block of `block_size` tokens."""
        return block_size * self.token_bytes


def cache_shape(spec: EngineSpec) -> CacheShape:
    """The bytes that follow from the model and its configuration."""
    config, model, itemsize = spec.config, spec.model_shard, spec.dtype.itemsize
    # Every layer that keeps keys and values: the target's and the MTP layer.
    vectors = 2 * (model.num_attention_layers + (spec.mtp_step > 0)) * model.num_kv_heads
    scale_bytes = 0 if spec.kv_dtype == spec.dtype else KV_SCALE_BYTES
    token_bytes = vectors * (model.head_dim * spec.kv_dtype.itemsize + scale_bytes)
    if config.routed_experts:
        token_bytes += _INT16_BYTES * model.num_layers * model.num_experts_per_tok
    length = ring_length(spec.max_drafts, model.conv_kernel)
    state = model.linear_value_dim * model.linear_key_head_dim * FLOAT32_BYTES
    states = model.num_gdn_layers * (state + length * model.linear_conv_dim * itemsize)
    entry = (model.linear_key_dim + model.linear_value_dim + model.linear_num_value_heads) * FLOAT32_BYTES
    row_bytes = states + model.num_gdn_layers * length * entry
    row_bytes += sampling_bytes(model.vocab_size, spec.max_model_len if config.scoring else 0)
    row_bytes += sum(row.num_bytes for row in spec.draft_rows(spec.max_model_len))
    snapshot = -(-(states + model.hidden_size * itemsize) // _ROW_ALIGNMENT) * _ROW_ALIGNMENT
    return CacheShape(token_bytes, row_bytes, snapshot)


def vision_bytes(spec: EngineSpec) -> int:
    """Bytes of images besides the tower's weights, 0 without images: the tower's peak for the largest image,
    the features that a prompt chunk reads (a chunk may cut an image at each end), and prefill's inputs.
    """
    vision = spec.model.vision
    if vision is None:
        return 0
    row_bytes = spec.model.hidden_size * spec.dtype.itemsize
    features = (2 * spec.prefill_chunk + 2 * vision.most_tokens) * row_bytes
    return tower_bytes(vision, spec.dtype.itemsize) + features


def staging_bytes(config: EngineConfig, shape: CacheShape) -> int:
    """Bytes of the buffers in which a GPU packs what it copies to and from host memory."""
    block_bytes = shape.block_bytes(config.block_size)
    segment = blocks_in_segment(block_bytes) * block_bytes
    offload = 0 if config.offload_gb == 0 else max(shape.state_row_bytes, segment)
    return offload + (max(shape.snapshot_bytes, segment) if config.prefix_cache else 0)


def length_bytes(spec: EngineSpec, longest: int, max_batch: int, rounds: Collection[tuple[int, int]]) -> int:
    """Bytes of what grows with the longest request: rotary table, block tables, and on a GPU the partial
    results of attention's splits, which the layers use one after another.

    rounds: requests, and rows of each.
    """
    most_rows = max(requests * rows for requests, rows in rounds)
    config, model = spec.config, spec.model_shard
    tables = longest * model.rotary_dim * FLOAT32_BYTES
    tables += (max_batch + SPARE_SLOTS + most_rows) * -(-longest // config.block_size) * _INT32_BYTES
    if spec.device.type == "cpu":
        return tables
    partials = max(rows * count_partials(requests, longest, model.num_kv_heads) for requests, rows in rounds)
    return tables + partials * model.num_q_heads * (model.head_dim + 2) * FLOAT32_BYTES
