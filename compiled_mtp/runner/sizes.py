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
    """The numbers of a model and its configuration that decide how many bytes a request takes.

    num_attention_layers counts every layer that keeps keys and values: the target's and the MTP layer.
    ring_length: entries of the rings of GDN inputs and conv inputs. kv_bytes and conv_bytes: bytes per
    element; kv_scale_bytes: bytes of the scale of one head's key or value, 0 for a cache without scales.
    sampling_bytes: bytes of a request's sampling tables; hidden_bytes: bytes of one token's hidden state;
    draft_bytes: bytes of what drafters keep of a request. expert_bytes: bytes of one token's recorded experts
    in all layers.
    """

    num_attention_layers: int
    num_kv_heads: int
    head_dim: int
    kv_bytes: int
    num_gdn_layers: int
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_dim: int
    conv_bytes: int
    ring_length: int
    kv_scale_bytes: int = 0
    sampling_bytes: int = 0
    hidden_bytes: int = 0
    draft_bytes: int = 0
    expert_bytes: int = 0

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block of `block_size` tokens in all layers: keys, values, scales and experts."""
        vector_bytes = self.head_dim * self.kv_bytes + self.kv_scale_bytes
        keys_bytes = 2 * self.num_attention_layers * self.num_kv_heads * vector_bytes
        return block_size * (keys_bytes + self.expert_bytes)

    def state_row_bytes(self) -> int:
        """Bytes of one request: float32 state and ring entries of the GDN layers, raw conv inputs, sampling
        tables, what drafters keep."""
        entry = self.num_key_heads * self.key_head_dim + self.num_value_heads * (self.value_head_dim + 1)
        rings = self.num_gdn_layers * self.ring_length * entry * FLOAT32_BYTES
        return self._prefill_state_bytes() + rings + self.sampling_bytes + self.draft_bytes

    def snapshot_bytes(self) -> int:
        """Bytes of a state snapshot: the states, conv inputs and hidden state that the next chunk reads."""
        flat = self._prefill_state_bytes() + self.hidden_bytes
        return -(-flat // _ROW_ALIGNMENT) * _ROW_ALIGNMENT

    def _prefill_state_bytes(self) -> int:
        state = self.num_value_heads * self.key_head_dim * self.value_head_dim
        conv = self.ring_length * self.conv_dim * self.conv_bytes
        return self.num_gdn_layers * (state * FLOAT32_BYTES + conv)


def cache_shape(spec: EngineSpec) -> CacheShape:
    """The numbers that decide how many bytes a request takes on this rank."""
    model, scale_bytes = spec.model_shard, 0 if spec.kv_dtype == spec.dtype else KV_SCALE_BYTES
    return CacheShape(
        num_attention_layers=model.num_attention_layers + (spec.mtp_step > 0),
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        kv_bytes=spec.kv_dtype.itemsize,
        num_gdn_layers=model.num_gdn_layers,
        num_key_heads=model.linear_num_key_heads,
        num_value_heads=model.linear_num_value_heads,
        key_head_dim=model.linear_key_head_dim,
        value_head_dim=model.linear_value_head_dim,
        conv_dim=model.linear_conv_dim,
        conv_bytes=spec.dtype.itemsize,
        ring_length=ring_length(spec.max_drafts, model.conv_kernel),
        kv_scale_bytes=scale_bytes,
        sampling_bytes=sampling_bytes(model.vocab_size, spec.max_model_len if spec.config.scoring else 0),
        hidden_bytes=model.hidden_size * spec.dtype.itemsize,
        draft_bytes=sum(row.num_bytes for row in spec.draft_rows(spec.max_model_len)),
        expert_bytes=_INT16_BYTES * model.num_layers * model.num_experts_per_tok
        if spec.config.routed_experts
        else 0,
    )


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
    offload = 0 if config.offload_gb == 0 else max(shape.state_row_bytes(), segment)
    return offload + (max(shape.snapshot_bytes(), segment) if config.prefix_cache else 0)


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
