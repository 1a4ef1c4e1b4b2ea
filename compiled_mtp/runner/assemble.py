"""Puts an engine's device side together: weights, memory, caches, programs.

Whatever can be refused without the weights is refused before they are loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch

from compiled_mtp.cache.kv_cache import KVCache
from compiled_mtp.cache.moves import Moves
from compiled_mtp.cache.slot_state import SlotState
from compiled_mtp.cache.state_cache import StateCache
from compiled_mtp.communicators.communicator import Exchange
from compiled_mtp.config import EngineConfig
from compiled_mtp.graphs.artifacts import (
    PROGRAMS_NAME,
    check_key,
    load,
    read_key,
)
from compiled_mtp.graphs.buckets import ladders
from compiled_mtp.graphs.later import LaterDepths, LaterProgram
from compiled_mtp.model_config import ModelConfig
from compiled_mtp.models.direct import reach_directly
from compiled_mtp.models.family import FAMILIES
from compiled_mtp.models.layers import rotary_table
from compiled_mtp.models.mtp import DraftModel
from compiled_mtp.models.packing import pack_weights
from compiled_mtp.models.qwen3_5 import TargetModel
from compiled_mtp.models.row_unit import find_row_unit, shares_of, weights_of
from compiled_mtp.models.weight_format import Formats, describe_recipe
from compiled_mtp.models.weights import check_weights, load_weights
from compiled_mtp.plan import SPARE_SLOTS
from compiled_mtp.rounds.prompt_logprobs import SLICE_ROWS
from compiled_mtp.runner.cache_sizes import (
    cache_shape,
    length_bytes,
    prefix_cache_bytes,
    staging_bytes,
)
from compiled_mtp.runner.depth_choice import further_depths
from compiled_mtp.runner.graph_choice import choose_graph_mode
from compiled_mtp.runner.host_memory import OFFLOAD_SHARE, plan_host_memory
from compiled_mtp.runner.memory import (
    HostPlan,
    MemoryPlan,
    available_bytes,
    check_offload,
    plan_memory,
)
from compiled_mtp.runner.programs import Programs
from compiled_mtp.runner.settings import Settings, early_key, late_key, resolve
from compiled_mtp.spec.depth import first_depth
from compiled_mtp.step import Step

logger = logging.getLogger(__name__)

# Of the memory that is free once the weights are loaded; activations take the rest.
_CACHE_SHARE = 0.85

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


def build(
    config: EngineConfig,
    model_config: ModelConfig,
    num_valid_ids: int,
    progress: Progress | None = None,
    fill: Fill | None = None,
    exchange: Exchange | None = None,
    save_to: Path | None = None,
) -> Assembly:
    """Load the weights, size and allocate the caches, compile. Sets threads and operators of the process.

    `fill` writes the parameters instead of the checkpoint's loader (benchmarks: no weights of that size are
    at hand). `exchange`: several ranks hold the model, of which this is one; all call `build` alike.
    save_to: a directory that does not exist yet, into which every compiled program is written.
    Raises ValueError for a checkpoint, a machine or a graph_cache that does not fit the config.
    """
    settings = resolve(config, model_config, num_valid_ids, exchange, is_checkpoint=fill is None)
    key = early_key(settings)
    if settings.cache is not None:
        stored = read_key(settings.cache)
        # Of what differs with it the number of ranks is the cause.
        check_key(settings.cache, stored | {"tensor_parallel": settings.world})
        check_key(settings.cache, stored | key)
    if fill is None:
        check_weights(
            model_config,
            config.model,
            settings.formats,
            settings.dtype,
            with_mtp=settings.mtp_step > 0,
            free_bytes=_free_bytes(settings),
            rank=0 if exchange is None else exchange.rank,
            world=settings.world,
            prompt_rows=settings.prompt_rows,
            allow_extra=config.allow_extra_tensors,
        )
    target, draft = _load(settings, progress, fill)
    if settings.device.type == "cpu":
        pack_weights(target, draft, model_config, settings.formats, exchange)
    unit = _row_unit(settings, target)
    buckets = ladders(unit, settings.shapes, config.max_batch, config.batch_sizes)
    most_rows = max(bucket.rows for bucket in buckets)
    draft_head_bytes = settings.draft_head.num_bytes(target.head_weight)
    memory = _plan_memory(settings, draft_head_bytes, most_rows)
    num_blocks = memory.num_blocks
    host_bytes = _host_bytes(settings)
    host, shelf = plan_host_memory(config, settings.device.type, memory, host_bytes, settings.world)
    max_model_len = _bound_length(settings, num_blocks)
    weight_bytes = sum(parameter.nbytes for parameter in target.parameters())
    draft_bytes = 0 if draft is None else sum(parameter.nbytes for parameter in draft.parameters())
    recipe = describe_recipe(settings.recipe, settings.formats)
    logger.info("%d MiB of weights%s, %s", (weight_bytes + draft_bytes) >> 20, recipe, memory.describe())
    graph_mode = choose_graph_mode(config, settings.device, weight_bytes, is_compiled=settings.is_compiled)
    if exchange is not None and graph_mode is not None:
        # Trees would capture, or not, on each rank as they see fit.
        graph_mode = "replay"
    key |= late_key(settings, buckets, num_blocks, graph_mode)
    saved = _find_programs(settings, key)
    step = _make_step(settings, target, draft, num_blocks, max_model_len)
    moves = _make_moves(settings, step, memory, host, shelf)
    # All that is saved is compiled.
    further = () if save_to is not None else further_depths(config, is_compiled=settings.is_compiled)
    programs = Programs(
        step,
        buckets,
        config.resolve_prefill_chunk(settings.device.type, model_config),
        is_compiled=settings.is_compiled,
        graph_mode=graph_mode,
        plain_depths=() if saved is not None else further,
        exchange=exchange,
    )
    # Ranks would adopt what comes later each at its own time.
    later = further if saved is not None and exchange is None else ()
    if settings.has_shapes:
        first = first_depth(config.depths) if later else None
        told = None if progress is None else partial(progress, "compiled shapes")
        made = None if save_to is None else settings.own_folder(save_to)
        programs.warm_up(told, saved, depth=first, save_to=made)
    else:
        for model in (target, *([draft] if draft is not None else [])):
            reach_directly(model)
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
        later=_later(programs, later, saved),
    )


def _find_programs(settings: Settings, key: Mapping[str, Any]) -> Path | None:
    """The programs of a graph_cache; absent from one for CUDA-graph trees, which compile from the others."""
    if settings.cache is None:
        return None
    check_key(settings.cache, key)
    directory = settings.own_folder(load(settings.cache) / PROGRAMS_NAME)
    return directory if directory.is_dir() else None


def _bound_length(settings: Settings, num_blocks: int) -> int:
    """max_model_len, or what all blocks hold where that is less."""
    block_size, longest = settings.config.block_size, settings.max_model_len
    room = (num_blocks - 1) * block_size
    if room < longest:
        text = "a request ends after %d tokens, not %d: %d blocks of %d tokens hold no more"
        logger.warning(text, room, longest, num_blocks - 1, block_size)
    return min(longest, room)


def _make_moves(settings: Settings, step: Step, memory: MemoryPlan, host: HostPlan, shelf: HostPlan) -> Moves:
    # Rank 0 plans by its own copies.
    is_follower = settings.exchange is not None and settings.exchange.rank > 0
    tensors = (step.slot_tensors, step.slots.block_table, step.kv_cache)
    moves = Moves(*tensors, holds_launches=is_follower)
    if host.num_records:
        moves.allocate_host(host.num_records, host.num_blocks)
    if memory.num_checkpoints:
        moves.allocate_checkpoints(memory.num_checkpoints)
        if shelf.num_records:
            moves.allocate_shelf(shelf.num_records, shelf.num_blocks)
    elif settings.config.prefix_cache:
        logger.warning("prompts are prefilled from their beginnings: no memory is left for a prefix cache")
    return moves


def _later(programs: Programs, depths: Sequence[int], saved: Path | None) -> LaterDepths | None:
    """What loads the programs of these depths from a cache while the engine works."""
    if not depths:
        return None
    assert saved is not None
    later = [
        LaterProgram(shape.depth or 0, saved / shape.name, partial(programs.adopt, shape))
        for shape in programs.shapes_of(depths)
    ]
    return LaterDepths(later, programs.step, lambda: programs.is_between_rounds)


def _load(
    settings: Settings, progress: Progress | None, fill: Fill | None
) -> tuple[TargetModel, DraftModel | None]:
    model, exchange = settings.model, settings.exchange
    place = (settings.part, settings.dtype, settings.device, settings.formats, exchange)
    family = FAMILIES[model.family]
    target = family.target(*place)
    draft = family.draft(*place) if settings.mtp_step else None
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
            rank=0 if exchange is None else exchange.rank,
            world=settings.world,
            prompt_rows=settings.prompt_rows,
            allow_extra=settings.config.allow_extra_tensors,
            # Of the time that reading from the page cache takes, it adds a third on a CPU, a 25th on a GPU.
            is_checked=settings.device.type == "cuda" or settings.config.check_weights,
            progress=report,
        )
    return target, draft


@torch.no_grad()
def _make_step(
    settings: Settings,
    target: TargetModel,
    draft: DraftModel | None,
    num_blocks: int,
    max_model_len: int,
) -> Step:
    config, model, device = settings.config, settings.part, settings.device
    slots, block_size, mtp_step = config.max_batch + SPARE_SLOTS, config.block_size, settings.mtp_step
    # Before the caches, since making it takes more than it is.
    draft_head = settings.draft_head.make(target.head_weight, target.head_rows)
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
    )


def _row_unit(settings: Settings, target: TargetModel) -> int:
    """The granularity of rows within which a row's bits do not depend on the rows beside it."""
    if settings.device.type == "cuda":
        return 1
    config = settings.config
    units = (1, 2, 4, 8)
    each = [ladders(unit, settings.shapes, config.max_batch, config.batch_sizes) for unit in units]
    row_counts = sorted({bucket.rows for buckets in each for bucket in buckets})
    weights = [*weights_of(target.modules()), *shares_of(target.modules()), target.head_weight]
    found = find_row_unit(weights, row_counts)
    # The largest of all ranks: each one's is a multiple of the smaller ones.
    unit = -settings.agree(-(found or 2 * units[-1]))
    if unit > units[-1]:
        logger.warning(
            "this machine's matrix library gives a row other bits with other rows beside it: tokens may "
            "depend on the batch and on mtp_step here"
        )
        return units[-1]
    return unit


def _plan_memory(settings: Settings, draft_head_bytes: int, most_rows: int) -> MemoryPlan:
    """What fits beside the weights, a draft head of its own, a slice of a prompt's
    logits, and what grows with the longest request: tables, and the parts of attention's sums.
    """
    config, model, dtype, kv_dtype = settings.config, settings.part, settings.dtype, settings.kv_dtype
    shape = cache_shape(model, dtype, kv_dtype, settings.mtp_step)
    # Code is compiled for the caches' shapes: a graph_cache says how many blocks it was made for.
    cached = None if settings.cache is None else read_key(settings.cache).get("num_blocks")
    other_bytes = draft_head_bytes + SLICE_ROWS * model.vocab_size * torch.float32.itemsize
    # What rounds of depth 0 keep for the draft.
    other_bytes += (
        (config.max_batch + SPARE_SLOTS) * (settings.mtp_step + 1) * model.hidden_size * dtype.itemsize
    )
    block_bytes, free_bytes = shape.block_bytes(config.block_size), _free_bytes(settings)
    host_bytes = 0
    if settings.device.type == "cpu":
        # The host tier lies in the same memory.
        if config.offload_gb is not None:
            host_bytes = int(config.offload_gb * 2**30) // settings.world
            check_offload(host_bytes, free_bytes)
        else:
            host_bytes = int(free_bytes * OFFLOAD_SHARE)
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
        prefix_cache_bytes=prefix_cache_bytes(config, settings.world if settings.device.type == "cpu" else 1),
        blocks_per_chunk=config.resume_step // config.block_size,
        host_bytes=host_bytes,
        other_bytes=other_bytes + length_bytes(config, model, settings.device.type, longest, most_rows),
    )


def _free_bytes(settings: Settings) -> int:
    """Bytes that nobody uses on the device now, with the weights loaded: this rank's share of them."""
    if settings.device.type == "cuda":
        return settings.agree(torch.cuda.mem_get_info(settings.device)[0])
    return _host_bytes(settings)


def _host_bytes(settings: Settings) -> int:
    """This rank's share of the host's free memory, the same on each."""
    return settings.agree(available_bytes() // settings.world)
