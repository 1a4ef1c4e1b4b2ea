"""All sizes, resolved once the weights are loaded: blocks, state rows, state snapshots, host memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from compiled_mtp.cache.host_tier import blocks_in_segment
from compiled_mtp.cache.kv_cache import KV_SCALE_BYTES
from compiled_mtp.cache.slot_state import sampling_bytes
from compiled_mtp.cache.state_cache import ring_length
from compiled_mtp.config.engine_config import DEFAULT_BATCH, DEFAULT_GPU_BATCH, EngineConfig
from compiled_mtp.graphs.artifacts import read_key
from compiled_mtp.graphs.buckets import RoundShape, prompt_chunk_limit
from compiled_mtp.ops.paged_attention.splits import count_partials
from compiled_mtp.plan import SPARE_SLOTS
from compiled_mtp.rounds.prompt_logprobs import SLICE_ROWS
from compiled_mtp.runner.spec import EngineSpec
from compiled_mtp.scheduler.limits import Limits
from compiled_mtp.vision.tower import tower_bytes

logger = logging.getLogger(__name__)

# The share in the host's free memory of offloaded requests, and as much again of the prefix cache's host
# tier, where the config gives no number.
_OFFLOAD_SHARE = 0.1
# Tokens of each request for which the default max_batch leaves room.
_TOKENS_EACH = 4096
# The drafts of wide rounds that an engine may have, and the largest share that the longer rings of its slots
# may take of the memory that is left for blocks.
_WIDE_DRAFTS, _WIDE_SHARE = (15, 7, 3), 1 / 16
# A default above this many requests takes at most a share of the free memory for what only many need: their
# state rows and attention's partial results. Few long texts must not lose their blocks to it.
_MANY_REQUESTS, _MANY_SHARE = 32, 1 / 4
# Tokens of a prompt per state snapshot in the host tier of the prefix cache, at least.
_PREFIX_HOST_TOKENS = 512
_INT16_BYTES = 2
_INT32_BYTES = 4
_FLOAT32_BYTES = 4
# Bytes to whose multiples `RowLayout` rounds a row of packed tensors.
_ROW_ALIGNMENT = 64
# Block 0, and one of a request.
_LEAST_BLOCKS = 2
# The most bytes of the prefix cache's state snapshots, and their largest share in free memory, where the
# config gives no number.
_DEFAULT_PREFIX_CACHE_BYTES = 4 << 30
_PREFIX_CACHE_SHARE = 1 / 8


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
        rings = self.num_gdn_layers * self.ring_length * entry * _FLOAT32_BYTES
        return self._prefill_state_bytes() + rings + self.sampling_bytes + self.draft_bytes

    def snapshot_bytes(self) -> int:
        """Bytes of a state snapshot: the states, conv inputs and hidden state that the next chunk reads."""
        flat = self._prefill_state_bytes() + self.hidden_bytes
        return -(-flat // _ROW_ALIGNMENT) * _ROW_ALIGNMENT

    def _prefill_state_bytes(self) -> int:
        state = self.num_value_heads * self.key_head_dim * self.value_head_dim
        conv = self.ring_length * self.conv_dim * self.conv_bytes
        return self.num_gdn_layers * (state * _FLOAT32_BYTES + conv)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The sizes of all caches.

    num_blocks counts block 0, and num_state_rows counts SPARE_SLOTS: no request owns these. max_model_len:
    the tokens of one request that num_blocks hold, at most those of the spec. num_snapshots: state snapshots
    of the prefix cache. other_bytes: bytes of the device for everything except caches and weights.
    host_records and host_blocks: the host tier of offloaded requests; prefix_host_records and
    prefix_host_blocks: the host tier of the prefix cache.
    """

    num_blocks: int
    num_state_rows: int
    max_model_len: int
    block_bytes: int
    state_row_bytes: int
    num_snapshots: int = 0
    snapshot_bytes: int = 0
    other_bytes: int = 0
    host_records: int = 0
    host_blocks: int = 0
    prefix_host_records: int = 0
    prefix_host_blocks: int = 0

    @property
    def max_batch(self) -> int:
        """The most requests decoded together: one for each state row that is not spare."""
        return self.num_state_rows - SPARE_SLOTS

    @property
    def total_bytes(self) -> int:
        """Bytes that the engine takes on the device besides the weights and a launch's temporary buffers.

        A CPU allocates the pages of blocks only when they are written.
        """
        rows_bytes = self.num_state_rows * self.state_row_bytes
        blocks_bytes = self.num_blocks * self.block_bytes
        return blocks_bytes + rows_bytes + self.num_snapshots * self.snapshot_bytes + self.other_bytes

    def describe(self) -> str:
        """The plan as one line of a log."""
        slots = f"{self.max_batch} slots of {self.state_row_bytes / 2**20:.1f} MiB"
        counts = f"{self.num_blocks - 1} blocks, {slots}"
        others = f"{self.num_snapshots} state snapshots and other buffers"
        return f"{self.total_bytes >> 20} MiB for {counts}, {others}"


def resolve_max_batch(spec: EngineSpec, free_bytes: int) -> int:
    """Return the config's max_batch, or its default: that of the graph_cache, or what the device's free_bytes
    hold."""
    config = spec.config
    if config.max_batch is not None:
        return config.max_batch
    if spec.cache is not None:
        return int(read_key(spec.cache)["max_batch"])
    least = max(DEFAULT_BATCH, *(config.batch_sizes or ()), 0)
    if spec.device.type == "cpu":
        return least
    # Of batches above the least, which is not compared with memory.
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
    left = int(free_bytes * config.memory_utilization) - slots * least.state_row_bytes()
    left -= (config.num_blocks or 0) * least.block_bytes(config.block_size)

    def fits(wide: EngineSpec) -> bool:
        more_bytes = slots * (cache_shape(wide).state_row_bytes() - least.state_row_bytes())
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
    less; num_blocks replaces the blocks of all. State snapshots keep their default share. Of more than
    _MANY_REQUESTS, state rows and the scratch_bytes of so many take at most _MANY_SHARE of `free_bytes`.
    """
    room = free_bytes - min(_DEFAULT_PREFIX_CACHE_BYTES, int(free_bytes * _PREFIX_CACHE_SHARE))
    blocks_each = -(-min(max_model_len, _TOKENS_EACH) // block_size)
    batch = DEFAULT_GPU_BATCH
    while batch > DEFAULT_BATCH:
        blocks = num_blocks or batch * blocks_each + 1
        rows_bytes = (batch + SPARE_SLOTS) * shape.state_row_bytes()
        blocks_bytes, most_bytes = blocks * shape.block_bytes(block_size), room
        if batch > _MANY_REQUESTS:
            rows_bytes += scratch_bytes(batch)
            most_bytes = min(room, blocks_bytes + int(_MANY_SHARE * free_bytes))
        if rows_bytes + blocks_bytes <= most_bytes:
            break
        batch //= 2
    return batch


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
    other_bytes = draft_head_bytes + SLICE_ROWS * spec.model_shard.vocab_size * _FLOAT32_BYTES
    other_bytes += vision_bytes(spec)
    offload_bytes = 0
    if not is_cpu:
        other_bytes += staging_bytes(config, shape)
    elif config.offload_gb is not None:
        # On a CPU the host tier takes the same memory as the caches.
        offload_bytes = int(config.offload_gb * 2**30) // spec.world
        check_offload(offload_bytes, free_bytes)
    else:
        offload_bytes = int(free_bytes * _OFFLOAD_SHARE)
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


def plan_memory(
    free_bytes: int,
    shape: CacheShape,
    *,
    block_size: int,
    max_batch: int,
    max_model_len: int,
    num_blocks: int | None = None,
    prefix_cache_bytes: int | None = 0,
    blocks_per_chunk: int = 1,
    other_bytes: int = 0,
    host_bytes: int = 0,
) -> MemoryPlan:
    """Return how many blocks, state rows and state snapshots fit into `free_bytes`.

    other_bytes and host_bytes are subtracted first: buffers of the engine, and on a CPU the host tier of
    offloaded requests, which takes the same memory. Blocks: exactly `num_blocks` if given, else at most those
    that max_batch requests of max_model_len tokens can use. Snapshots: at most one per blocks_per_chunk
    blocks, of prefix_cache_bytes together, 0 for none; None for the least of _DEFAULT_PREFIX_CACHE_BYTES, an
    eighth of what is free, and what is left. Raises ValueError with the numbers if max_batch state rows,
    those snapshots and those blocks, or one block, do not fit.
    """
    all_bytes = free_bytes
    free_bytes -= other_bytes + host_bytes
    rows = max_batch + SPARE_SLOTS
    block_bytes, row_bytes = shape.block_bytes(block_size), shape.state_row_bytes()
    each_bytes = shape.snapshot_bytes()
    least_bytes = (num_blocks or _LEAST_BLOCKS) * block_bytes + rows * row_bytes
    wanted = _count_snapshots(prefix_cache_bytes, free_bytes, least_bytes, each_bytes)
    count = num_blocks
    if count is None:
        room = max(free_bytes - rows * row_bytes - wanted * each_bytes, 0) // block_bytes
        count = max(min(room, max_batch * -(-max_model_len // block_size) + 1), _LEAST_BLOCKS)
    needed = count * block_bytes + rows * row_bytes + wanted * each_bytes
    if needed > free_bytes:
        snapshots = f", {wanted} state snapshots of {_mib(each_bytes)}" if wanted else ""
        others = [(host_bytes, "offloaded requests"), (other_bytes, "other buffers")]
        besides = " and ".join(f"{_mib(count)} for {what}" for count, what in others if count)
        besides = f", besides {besides}" if besides else ""
        raise ValueError(
            f"free memory must hold {_mib(needed)} of caches ({rows} state rows of {_mib(row_bytes)}, "
            f"{count} blocks of {_mib(block_bytes)}{snapshots}){besides}, got {_mib(all_bytes)}; lower "
            f"max_batch{', prefix_cache_gb' if wanted else ''}{', offload_gb' if host_bytes else ''} or "
            "num_blocks"
        )
    num_snapshots = min(wanted, (count - 1) // blocks_per_chunk)
    longest = min(max_model_len, (count - 1) * block_size)
    return MemoryPlan(count, rows, longest, block_bytes, row_bytes, num_snapshots, each_bytes, other_bytes)


def _count_snapshots(given_bytes: int | None, free_bytes: int, least_bytes: int, each_bytes: int) -> int:
    """How many state snapshots to make room for; without given_bytes at most what least_bytes leaves free."""
    if given_bytes is None:
        share = min(_DEFAULT_PREFIX_CACHE_BYTES, int(free_bytes * _PREFIX_CACHE_SHARE))
        return max(min(share, free_bytes - least_bytes), 0) // each_bytes
    if 0 < given_bytes < each_bytes:
        raise ValueError(
            f"prefix_cache_gb must hold a state snapshot of {_mib(each_bytes)}, got {_mib(given_bytes)}; "
            "raise it, or turn prefix_cache off"
        )
    return given_bytes // each_bytes


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
    share = int(free_bytes * _OFFLOAD_SHARE)
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
        "up to %d MiB of the host's memory when they are needed: %d for offloaded requests, %d for the "
        "prefix cache",
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
    return min(_DEFAULT_PREFIX_CACHE_BYTES if given is None else given, most_bytes)


def vision_bytes(spec: EngineSpec) -> int:
    """Bytes of images besides the tower's weights, 0 without images: the tower's peak for the largest image,
    the features that a prompt chunk reads, with those of an image cut at each end, and prefill's inputs.
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
    tables = longest * model.rotary_dim * _FLOAT32_BYTES
    tables += (max_batch + SPARE_SLOTS + most_rows) * -(-longest // config.block_size) * _INT32_BYTES
    if spec.device.type == "cpu":
        return tables
    partials = max(rows * count_partials(requests, longest, model.num_kv_heads) for requests, rows in rounds)
    return tables + partials * model.num_q_heads * (model.head_dim + 2) * _FLOAT32_BYTES


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
