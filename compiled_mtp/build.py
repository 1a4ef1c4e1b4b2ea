"""Puts an engine's device side together: device, weights, memory, caches, programs, and the key of a cache of
compiled code.

Whatever can be refused without the weights is refused before they are loaded.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

import torch

from compiled_mtp.build_order import Features, Order
from compiled_mtp.cache.kv_cache import KVCache, resolve_kv_dtype
from compiled_mtp.cache.moves import Moves
from compiled_mtp.cache.slot_state import SlotState
from compiled_mtp.cache.state_cache import StateCache
from compiled_mtp.cache_sizes import (
    cache_shape,
    length_bytes,
    prefix_cache_bytes,
    staging_bytes,
)
from compiled_mtp.config import EngineConfig
from compiled_mtp.draft_choice import plan_draft_head
from compiled_mtp.graph_choice import choose_compiled, choose_graph_mode
from compiled_mtp.graphs.artifacts import (
    PROGRAMS_NAME,
    check_key,
    load,
    machine_key,
    read_key,
    source_digest,
)
from compiled_mtp.graphs.buckets import Bucket, ladders
from compiled_mtp.graphs.compile import GraphMode
from compiled_mtp.graphs.later import LaterDepths, LaterProgram
from compiled_mtp.graphs.maker import ProgramMaker
from compiled_mtp.host_memory import OFFLOAD_SHARE, plan_host_memory
from compiled_mtp.memory import (
    HostPlan,
    MemoryPlan,
    available_bytes,
    plan_memory,
)
from compiled_mtp.model_config import ModelConfig
from compiled_mtp.models.draft_head import DraftHeadPlan
from compiled_mtp.models.family import FAMILIES
from compiled_mtp.models.finite import check_finite
from compiled_mtp.models.headers import read_headers
from compiled_mtp.models.layers import rotary_table
from compiled_mtp.models.mtp import DraftModel
from compiled_mtp.models.packing import pack_weights
from compiled_mtp.models.qwen3_5 import TargetModel
from compiled_mtp.models.row_unit import find_row_unit, shares_of, weights_of
from compiled_mtp.models.weight_format import Formats, Recipe, describe_recipe, resolve_recipe
from compiled_mtp.models.weights import check_weights, load_weights, read_formats
from compiled_mtp.ops.registry import use_reference
from compiled_mtp.plan import SPARE_SLOTS
from compiled_mtp.programs import Programs
from compiled_mtp.prompt_logprobs import SLICE_ROWS
from compiled_mtp.spec.depth import first_depth
from compiled_mtp.step import Step

logger = logging.getLogger(__name__)

# Of the memory that is free once the weights are loaded; activations take the rest.
_CACHE_SHARE = 0.85
# Of stored weights. Below, waiting for each other at every operator costs threads more than they save: the
# checkpoint that ships, of 22 MB, decodes at 1.6 times the speed with one thread as with two on two idle
# cores, and on busy ones at many times.
_LEAST_THREADED_BYTES = 64 << 20
# What the saved programs of a graph_cache were traced from, beside this file.
_TRACED = (
    *("cache", "graphs", "model_config.py", "models", "ops"),
    *("programs.py", "prompt_logprobs.py", "step.py", "step_output.py"),
)
# Fields that compiled code does not depend on, or not as they are given: the key holds what became of device,
# dtype, max_model_len, batch_sizes, num_blocks, graph_mode, num_threads, weight_recipe,
# draft_vocab, draft_head_dtype and prefill_chunk.
_CONFIG_APART = frozenset(
    (
        *("model", "offline", "compile", "graph_cache", "mtp_depths", "seed", "max_in_flight"),
        *("reference_ops", "prefix_cache", "prefix_cache_gb", "check_weights", "offload_gb", "mask_threads"),
        *("draft_vocab", "device", "dtype", "max_model_len", "batch_sizes", "num_blocks", "graph_mode"),
        *("num_threads", "weight_recipe", "draft_head_dtype", "prefill_chunk"),
    )
)
_MODEL_APART = ("eos_token_ids", "generation_defaults", "max_position_embeddings", "dtype", "quantized")

# The process that compiles further depths. Not `-m`: the package is found wherever this one came from.
_MAKER_CODE = (
    f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r}); "
    "from compiled_mtp.make_depths import main; main()"
)
# Of the host's memory, and the most of what is free.
_MAKER_BYTES, _MAKER_SHARE = 1 << 30, 0.1

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called with (what, done, total) while the engine starts."""

Fill: TypeAlias = Callable[[Mapping[str, torch.Tensor]], None]
"""Writes every parameter, by name."""


@dataclass(frozen=True)
class Assembly:
    """What a runner runs on, ready to use.

    max_model_len: of one request, as far as num_blocks hold it. formats: of the parameters that are not
    plain. host: room in host memory for those who leave the device; shelf: for what the prefix cache gives
    up there. later: what makes further depths ready, if anything does.
    """

    device: torch.device
    max_model_len: int
    num_blocks: int
    memory: MemoryPlan
    host: HostPlan
    shelf: HostPlan
    formats: Formats
    step: Step
    programs: Programs
    moves: Moves
    later: LaterDepths | None
    cache_key: Mapping[str, Any]


@dataclass(frozen=True)
class _Settings:
    """What follows from the configs before anything is loaded.

    depths: pairs (verified, left) of the rounds that will run, the last the deepest. cache: the
    graph_cache that is used.
    """

    config: EngineConfig
    model: ModelConfig
    features: Features
    is_compiled: bool
    depths: tuple[tuple[int, int], ...]
    num_valid_ids: int
    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    max_model_len: int
    recipe: Recipe | None
    formats: Formats
    cache: Path | None
    draft_head: DraftHeadPlan

    @property
    def mtp_step(self) -> int:
        """The most drafts of a round."""
        return self.depths[-1][1]


def build(
    config: EngineConfig,
    model_config: ModelConfig,
    num_valid_ids: int,
    features: Features,
    progress: Progress | None = None,
    fill: Fill | None = None,
) -> Assembly:
    """Load the weights, size and allocate the caches, compile. Sets threads and operators of the process.

    `fill` writes the parameters instead of the checkpoint's loader (benchmarks: no weights of that size are
    at hand). Raises ValueError for a checkpoint, a machine or a graph_cache that does not fit the config.
    """
    settings = _resolve(config, model_config, features, num_valid_ids, is_checkpoint=fill is None)
    key = _early_key(settings)
    if settings.cache is not None:
        check_key(settings.cache, read_key(settings.cache) | key)
    if fill is None:
        with_mtp, free_bytes = settings.mtp_step > 0, _free_bytes(settings.device)
        formats, dtype = settings.formats, settings.dtype
        check_weights(model_config, config.model, formats, dtype, with_mtp=with_mtp, free_bytes=free_bytes)
    target, draft = _load(settings, progress, fill)
    if settings.device.type == "cpu":
        pack_weights(target, draft)
    unit = _row_unit(settings, target)
    buckets = ladders(unit, settings.depths, config.max_batch, config.batch_sizes)
    most_rows = max(bucket.rows for bucket in buckets)
    half_rows = most_rows if features.with_halves else 0
    draft_head_bytes = settings.draft_head.num_bytes(target.head_weight)
    memory = _plan_memory(settings, draft_head_bytes, half_rows, most_rows)
    num_blocks = memory.num_blocks
    host, shelf = plan_host_memory(config, features, settings.device.type, memory, available_bytes())
    max_model_len = _bound_length(settings, num_blocks)
    weight_bytes = sum(parameter.nbytes for parameter in target.parameters())
    draft_bytes = 0 if draft is None else sum(parameter.nbytes for parameter in draft.parameters())
    recipe = describe_recipe(settings.recipe, settings.formats)
    logger.info("%d MiB of weights%s, %s", (weight_bytes + draft_bytes) >> 20, recipe, memory.describe())
    graph_mode = choose_graph_mode(config, settings.device, weight_bytes) if settings.is_compiled else None
    key |= _late_key(settings, buckets, num_blocks, graph_mode)
    saved = _find_programs(settings, key)
    step = _make_step(settings, target, draft, num_blocks, max_model_len, half_rows)
    moves = _make_moves(settings, step, memory, host, shelf)
    programs = _make_programs(settings, step, buckets, graph_mode)
    if settings.is_compiled:
        # A start is as long as with the first depth alone.
        first = first_depth(config.depths) if config.mtp_step == "auto" else None
        told = None if progress is None else partial(progress, "compiled shapes")
        programs.warm_up(told, saved, depth=first)
    order = Order(
        config=config,
        model=model_config,
        num_valid_ids=num_valid_ids,
        features=features,
        is_checkpoint=fill is None,
        depths=_later_depths(settings),
        buckets=buckets,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        half_rows=half_rows,
        num_threads=torch.get_num_threads(),
    )
    return Assembly(
        device=settings.device,
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        memory=memory,
        host=host,
        shelf=shelf,
        formats=settings.formats,
        step=step,
        programs=programs,
        moves=moves,
        cache_key=key,
        later=_later(settings, order, programs, saved),
    )


def lay_out(order: Order) -> Programs:
    """The programs of an engine, to be saved: its tensors have their shapes and strides, and no values."""
    settings = _resolve(
        order.config,
        order.model,
        order.features,
        order.num_valid_ids,
        is_checkpoint=order.is_checkpoint,
    )
    target, draft = _load(settings, None, lambda parameters: None)
    sizes = (order.num_blocks, order.max_model_len)
    step = _make_step(settings, target, draft, *sizes, order.half_rows)
    return _make_programs(settings, step, order.buckets, None)


def _make_programs(
    settings: _Settings, step: Step, buckets: Sequence[Bucket], graph_mode: GraphMode | None
) -> Programs:
    return Programs(
        step,
        buckets,
        settings.config.resolve_prefill_chunk(settings.device.type),
        is_compiled=settings.is_compiled,
        graph_mode=graph_mode,
        with_halves=settings.features.with_halves,
    )


def _find_programs(settings: _Settings, key: Mapping[str, Any]) -> Path | None:
    """The programs of a graph_cache; absent from one for CUDA-graph trees, which compile from the others."""
    if settings.cache is None:
        return None
    check_key(settings.cache, key)
    directory = load(settings.cache) / PROGRAMS_NAME
    return directory if directory.is_dir() else None


def _bound_length(settings: _Settings, num_blocks: int) -> int:
    """max_model_len, or what all blocks hold where that is less."""
    block_size, longest = settings.config.block_size, settings.max_model_len
    room = (num_blocks - 1) * block_size
    if room < longest:
        text = "a request ends after %d tokens, not %d: %d blocks of %d tokens hold no more"
        logger.warning(text, room, longest, num_blocks - 1, block_size)
    return min(longest, room)


def _make_moves(
    settings: _Settings, step: Step, memory: MemoryPlan, host: HostPlan, shelf: HostPlan
) -> Moves:
    moves = Moves(step.slot_tensors, step.slots.block_table, step.kv_cache)
    if host.num_records:
        moves.allocate_host(host.num_records, host.num_blocks)
    if memory.num_checkpoints:
        moves.allocate_checkpoints(memory.num_checkpoints)
        if shelf.num_records:
            moves.allocate_shelf(shelf.num_records, shelf.num_blocks)
    elif settings.config.prefix_cache:
        logger.warning("prompts are prefilled from their beginnings: no memory is left for a prefix cache")
    return moves


def _later_depths(settings: _Settings) -> tuple[int, ...]:
    """The depths that are made ready while requests are decoded: 0 first, since nothing is slower than it."""
    config = settings.config
    if config.mtp_step != "auto" or not settings.is_compiled:
        return ()
    return tuple(depth for depth in config.depths if depth != first_depth(config.depths))


def _later(settings: _Settings, order: Order, programs: Programs, saved: Path | None) -> LaterDepths | None:
    """What makes the other depths of mtp_step "auto" ready: from a cache, or compiled in a process."""
    if not order.depths:
        return None
    maker = None
    if saved is None:
        if settings.device.type == "cuda":
            # What compiles for a GPU beside the engine would take its memory, and kernels of ours are
            # compiled where they are first launched: in a step.
            logger.warning(
                "mtp_step auto keeps to depth %d: on a GPU the others come from a graph_cache; make one with "
                "`compiled-mtp export --mtp-step auto`",
                first_depth(settings.config.depths),
            )
            return None
        maker = ProgramMaker(_MAKER_CODE, pickle.dumps(order), programs.check_layout)
        saved = maker.folder
    later = [
        LaterProgram(shape.depth or 0, saved / shape.name, partial(programs.adopt, shape))
        for shape in programs.shapes_of(order.depths)
    ]
    return LaterDepths(later, programs.step, lambda: programs.is_between_rounds, maker)


def _resolve(
    config: EngineConfig,
    model_config: ModelConfig,
    features: Features,
    num_valid_ids: int,
    *,
    is_checkpoint: bool,
) -> _Settings:
    device = _resolve_device(config.device)
    is_compiled = choose_compiled(config, device)
    num_threads = config.num_threads
    if num_threads is None and device.type == "cpu" and is_checkpoint and _is_small(config.model):
        num_threads = 1
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    depths = _depths(config, features, is_compiled=is_compiled)
    use_reference(config.reference_ops)
    if config.reference_ops:
        logger.warning("on their reference: %s", ", ".join(config.reference_ops))
    dtype = getattr(torch, config.resolve_dtype(device.type, model_config))
    recipe = resolve_recipe(config.weight_recipe, has_fp8=model_config.quantized, device=device)
    cache = None if config.compile == "off" else config.graph_cache
    if cache is not config.graph_cache:
        logger.warning("running uncompiled: with compile=off graph_cache is not used")
    return _Settings(
        config=config,
        model=model_config,
        features=features,
        is_compiled=is_compiled,
        depths=depths,
        num_valid_ids=num_valid_ids,
        device=device,
        dtype=dtype,
        kv_dtype=resolve_kv_dtype(config.kv_dtype, dtype, device),
        max_model_len=config.resolve_max_model_len(model_config),
        recipe=recipe,
        formats=read_formats(model_config, config.model if is_checkpoint else None, device, recipe),
        cache=cache,
        draft_head=plan_draft_head(config, model_config, num_valid_ids, device, depths[-1][1]),
    )


def _is_small(path: Path) -> bool:
    """Whether threads cost more than they save."""
    return sum(header.num_bytes for header in read_headers(path).values()) < _LEAST_THREADED_BYTES


def _depths(config: EngineConfig, features: Features, *, is_compiled: bool) -> tuple[tuple[int, int], ...]:
    """Pairs of drafts that a round verifies and leaves."""
    if is_compiled and not features.depths:
        return tuple((depth, depth) for depth in config.depths)
    every = sorted({*features.depths}) if is_compiled else range(max(features.depths or config.depths) + 1)
    return tuple(product(every, every))


def _load(
    settings: _Settings, progress: Progress | None, fill: Fill | None
) -> tuple[TargetModel, DraftModel | None]:
    model, place = settings.model, (settings.dtype, settings.device, settings.formats)
    family = FAMILIES[model.family]
    target = family.target(model, *place)
    draft = family.draft(model, *place) if settings.mtp_step else None
    parameters = {name: parameter.data for name, parameter in target.named_parameters()}
    if draft is not None:
        parameters |= {f"mtp.{name}": parameter.data for name, parameter in draft.named_parameters()}
    if fill is not None:
        fill(parameters)
    else:
        report = None if progress is None else partial(progress, "weights")
        directory = settings.config.model
        load_weights(
            model,
            directory,
            parameters,
            with_mtp=draft is not None,
            formats=settings.formats,
            progress=report,
        )
        # Of the time that reading from the page cache takes, it adds a third on a CPU, and a 25th on a GPU.
        if settings.device.type == "cuda" or settings.config.check_weights:
            check_finite(parameters)
    return target, draft


@torch.no_grad()
def _make_step(
    settings: _Settings,
    target: TargetModel,
    draft: DraftModel | None,
    num_blocks: int,
    max_model_len: int,
    half_rows: int,
) -> Step:
    config, model, device = settings.config, settings.model, settings.device
    slots, block_size, mtp_step = config.max_batch + SPARE_SLOTS, config.block_size, settings.mtp_step
    # Before the caches, since making it takes more than it is.
    draft_head = settings.draft_head.make(target.head_weight)
    kv_cache = KVCache(model, num_blocks, block_size, settings.kv_dtype, device, with_draft=draft is not None)
    slot_state = SlotState(
        slots,
        mtp_step,
        -(-max_model_len // block_size),
        model.hidden_size,
        model.vocab_size,
        settings.dtype,
        device,
    )
    return Step(
        target,
        draft,
        kv_cache,
        StateCache(model, slots, mtp_step, settings.dtype, device),
        slot_state,
        rotary_table(model, max_model_len, device),
        mtp_step,
        settings.num_valid_ids,
        max_model_len,
        config.synthetic_acceptance,
        draft_head,
        half_rows,
    )


def _row_unit(settings: _Settings, target: TargetModel) -> int:
    """The granularity of rows within which a row's bits do not depend on the rows beside it."""
    if settings.device.type == "cuda":
        return 1
    config = settings.config
    units = (1, 2, 4, 8)
    each = [ladders(unit, settings.depths, config.max_batch, config.batch_sizes) for unit in units]
    row_counts = sorted({bucket.rows for buckets in each for bucket in buckets})
    weights = [*weights_of(target.modules()), *shares_of(target.modules()), target.head_weight]
    unit = find_row_unit(weights, row_counts)
    if unit is None:
        logger.warning(
            "this machine's matrix library gives a row other bits with other rows beside it: tokens may "
            "depend on the batch and on mtp_step here"
        )
        return 8
    return unit


def _plan_memory(settings: _Settings, draft_head_bytes: int, half_rows: int, most_rows: int) -> MemoryPlan:
    """What fits beside the weights, a draft head of its own, the rows of halves, a slice of a prompt's
    logits, and what grows with the longest request: tables, and the parts of attention's sums.
    """
    config, model, dtype, kv_dtype = settings.config, settings.model, settings.dtype, settings.kv_dtype
    shape = cache_shape(model, dtype, kv_dtype, settings.mtp_step)
    # Code is compiled for the caches' shapes: a graph_cache says how many blocks it was made for.
    cached = None if settings.cache is None else read_key(settings.cache).get("num_blocks")
    other_bytes = draft_head_bytes + half_rows * model.hidden_size * dtype.itemsize
    other_bytes += (half_rows + SLICE_ROWS) * model.vocab_size * torch.float32.itemsize
    # What rounds of depth 0 keep for the draft.
    other_bytes += (
        (config.max_batch + SPARE_SLOTS) * (settings.mtp_step + 1) * model.hidden_size * dtype.itemsize
    )
    block_bytes, free_bytes = shape.block_bytes(config.block_size), _free_bytes(settings.device)
    host_bytes = 0
    if settings.device.type == "cpu":
        # The host tier lies in the same memory.
        host_bytes += settings.features.host_records * shape.state_row_bytes()
        host_bytes += settings.features.host_blocks * block_bytes
        if config.offload_gb is not None:
            host_bytes += int(config.offload_gb * 2**30)
        elif not settings.features.host_records:
            host_bytes += int(free_bytes * OFFLOAD_SHARE)
        if settings.cache is None and _later_depths(settings):
            host_bytes += min(_MAKER_BYTES, int(free_bytes * _MAKER_SHARE))
    else:
        other_bytes += staging_bytes(config, shape)
    # No request is longer than all free memory, or than the blocks that are asked for.
    num_blocks = config.num_blocks or cached
    most_blocks = num_blocks - 1 if num_blocks else free_bytes // block_bytes
    longest = min(settings.max_model_len, most_blocks * config.block_size)
    return plan_memory(
        int(free_bytes * _CACHE_SHARE),
        shape,
        block_size=config.block_size,
        max_batch=config.max_batch,
        max_model_len=settings.max_model_len,
        num_blocks=num_blocks,
        prefix_cache_bytes=prefix_cache_bytes(config),
        blocks_per_chunk=config.resume_step // config.block_size,
        host_bytes=host_bytes,
        other_bytes=other_bytes + length_bytes(config, model, settings.device.type, longest, most_rows),
    )


def _early_key(settings: _Settings) -> dict[str, Any]:
    """What compiled code depends on, but for `_late_key`: what a graph_cache must have been made for.

    A field that is new in a config is part of it until it is named as being apart.
    """
    model = {f"model.{name}": value for name, value in asdict(settings.model).items()}
    for name in _MODEL_APART:
        del model[f"model.{name}"]
    given = settings.config.model_dump(mode="json", exclude=set(_CONFIG_APART))
    is_cpu = settings.device.type == "cpu"
    return {
        **model,
        **machine_key(settings.device),
        **given,
        "dtype": str(settings.dtype).removeprefix("torch."),
        "weight_recipe": settings.recipe,
        "weight_formats": {name: form.name for name, form in sorted(settings.formats.items())},
        "depths": settings.depths,
        "draft_ids": settings.draft_head.num_ids,
        "draft_head_is_fp8": settings.draft_head.is_fp8,
        "prefill_chunk": settings.config.resolve_prefill_chunk(settings.device.type),
        "with_halves": settings.features.with_halves,
        "num_valid_ids": settings.num_valid_ids,
        "max_model_len": settings.max_model_len,
        "source": source_digest(Path(__file__).parent / name for name in _TRACED),
        "num_threads": torch.get_num_threads() if is_cpu else 0,
    }


def _late_key(
    settings: _Settings, buckets: tuple[Bucket, ...], num_blocks: int, graph_mode: GraphMode | None
) -> dict[str, Any]:
    """What follows from the weights: the row unit's shapes, the blocks beside them, the graph mode."""
    sizes = [bucket.groups for bucket in buckets]
    key: dict[str, Any] = {"batch_sizes": sizes, "num_blocks": num_blocks}
    return key | ({"graph_mode": graph_mode} if settings.device.type == "cuda" else {})


def _free_bytes(device: torch.device) -> int:
    """Bytes that nobody uses on `device` now, with the weights loaded."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_bytes()


def _resolve_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device must be available, got cuda; torch finds no CUDA device, use device=cpu")
    return torch.device(name, torch.cuda.current_device()) if name == "cuda" else torch.device(name)
