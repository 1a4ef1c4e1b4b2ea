"""Puts an engine's device side together: weights, memory, caches, programs.

Checks that need no weights come before the weights are loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch

from compiled_mtp.cache.kv_cache import KVCache
from compiled_mtp.cache.moves import Moves
from compiled_mtp.cache.slot_state import SlotState
from compiled_mtp.cache.state_cache import StateCache
from compiled_mtp.graphs.artifacts import PROGRAMS_NAME, check_key, load
from compiled_mtp.graphs.compile import GraphMode
from compiled_mtp.graphs.later import LaterDepths, LaterProgram
from compiled_mtp.models.direct import reach_directly
from compiled_mtp.models.family import FAMILIES
from compiled_mtp.models.moe import MoE
from compiled_mtp.models.mtp import DraftModel
from compiled_mtp.models.packing import pack_weights
from compiled_mtp.models.qwen3_5 import TargetModel
from compiled_mtp.models.rotary import rotary_table
from compiled_mtp.models.row_unit import find_row_unit, k_splits_of, weights_of
from compiled_mtp.models.weight_format import Formats, describe_recipe
from compiled_mtp.models.weights import check_weights, load_weights
from compiled_mtp.runner.cache_key import early_key, late_key
from compiled_mtp.runner.device_memory import free_device_bytes
from compiled_mtp.runner.forecast import Buckets, buckets_of, draft_head_bytes, free_beside, size_caches
from compiled_mtp.runner.host_memory import available_bytes
from compiled_mtp.runner.max_batch import fit_wide_rounds, resolve_max_batch
from compiled_mtp.runner.memory_plan import MemoryPlan
from compiled_mtp.runner.programs import Programs
from compiled_mtp.runner.spec import EngineSpec, apply, choose_graph_mode
from compiled_mtp.spec.depth import first_depth
from compiled_mtp.step import Step
from compiled_mtp.vision.encoder import Encoder
from compiled_mtp.vision.tower import random_tower, weight_bytes
from compiled_mtp.vision.weights import load_tower

logger = logging.getLogger(__name__)

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called with (what, done, total) while the engine starts."""

Fill: TypeAlias = Callable[[Mapping[str, torch.Tensor]], None]
"""Writes every parameter; called with the parameters by name."""


class Parts(NamedTuple):
    """What a runner runs on, ready to use; spec: that of `build` once the number of slots is known; later:
    loads the programs of further depths, encoder: runs the vision tower, each None for none."""

    spec: EngineSpec
    memory: MemoryPlan
    step: Step
    programs: Programs
    moves: Moves
    later: LaterDepths | None
    encoder: Encoder | None


def build(
    spec: EngineSpec,
    progress: Progress | None = None,
    fill: Fill | None = None,
    save_to: Path | None = None,
    memory: MemoryPlan | None = None,
    tower_path: Path | None = None,
) -> Parts:
    """Load the weights, size and allocate the caches, compile. Sets threads and operators of the process.

    Every rank calls it with the same arguments, except its own spec. progress, fill and save_to are as in
    `Runner`. memory: the sizes of an earlier build, whose spec this is, None to resolve them from what is
    free. tower_path: the checkpoint of the vision tower, None for the model's. Raises ValueError for a
    checkpoint, a machine or a graph_cache that does not fit the config.
    """
    apply(spec)
    has_rounds = memory is not None
    if spec.cache is not None:
        # The number of ranks comes first: it makes other fields of the key differ too.
        check_key(spec.cache, {"tensor_parallel": spec.world}, is_whole=False)
        key = early_key(spec)
        check_key(spec.cache, key, is_whole=False)
    target, draft, encoder, free_bytes = _load(spec, progress, fill, tower_path or spec.config.model)
    models = [target] if draft is None else [target, draft]
    if memory is None:
        max_batch = resolve_max_batch(spec, free_bytes)
        spec = fit_wide_rounds(spec, max_batch, free_bytes)
    else:
        max_batch = memory.max_batch
    buckets, head_rows = make_buckets(spec, target, max_batch), target.num_head_rows
    if memory is None:
        sizes = {"free_bytes": free_bytes, "host_bytes": _host_bytes(spec)}
        memory = size_caches(spec, buckets, head_rows, **sizes)
    weight_bytes = [sum(parameter.nbytes for parameter in model.parameters()) for model in models]
    recipe = describe_recipe(spec.weight_recipe, spec.weight_formats)
    drafts = spec.drafts.describe(draft_head_bytes(spec, head_rows))
    logger.info("%d MiB of weights%s%s, %s", sum(weight_bytes) >> 20, recipe, drafts, memory.describe())
    graph_mode = choose_graph_mode(spec, weight_bytes[0])
    saved = None
    if spec.cache is not None:
        check_key(spec.cache, key | late_key(spec, buckets.every, memory, graph_mode))
        directory = spec.own_folder(load(spec.cache) / PROGRAMS_NAME)
        # A cache for CUDA-graph trees has no programs: the trees compile from the compiler's own caches.
        saved = directory if directory.is_dir() else None
    step = _make_step(spec, memory, target, draft)
    moves = _make_moves(spec, memory, step)
    programs, later = _make_programs(
        spec, step, buckets, encoder, graph_mode, saved, save_to, progress, has_rounds=has_rounds
    )
    if encoder is not None:
        encoder.warm_up()
    if not spec.has_shapes:
        for model in models:
            reach_directly(model)
    return Parts(spec, memory, step, programs, moves, later, encoder)


def _make_programs(
    spec: EngineSpec,
    step: Step,
    buckets: Buckets,
    encoder: Encoder | None,
    graph_mode: GraphMode | None,
    saved: Path | None,
    save_to: Path | None,
    progress: Progress | None,
    *,
    has_rounds: bool,
) -> tuple[Programs, LaterDepths | None]:
    """The programs, ready to run, and the loader of further depths from a cache while the engine works.

    has_rounds: rounds of every depth may follow at once, as after a wake-up.
    """
    # An export compiles and saves every depth.
    further = () if save_to is not None else spec.further_depths
    programs = Programs(
        step,
        buckets.drawn,
        spec.prefill_chunk,
        given_buckets=buckets.given,
        is_compiled=spec.is_compiled,
        graph_mode=graph_mode,
        plain_depths=() if saved is not None else further,
        communicator=spec.communicator,
        encoder=encoder,
    )
    # Several ranks load every depth at the start: later each would adopt a program at another step.
    is_later = saved is not None and spec.communicator is None and not has_rounds
    later = further if is_later else ()
    if spec.has_shapes:
        first = first_depth(spec.config.depths) if later else None
        shape_progress = None if progress is None else partial(progress, "compiled shapes")
        own_save_to = None if save_to is None else spec.own_folder(save_to)
        programs.warm_up(shape_progress, saved, depth=first, save_to=own_save_to)
    return programs, _later(programs, later, saved)


def _make_moves(spec: EngineSpec, memory: MemoryPlan, step: Step) -> Moves:
    # The other ranks do not tell rank 0 which copies are complete: their launches wait for every copy.
    tensors = (step.slot_tensors, step.slots.block_table, step.kv_cache)
    moves = Moves(*tensors, holds_launches=spec.rank > 0)
    if memory.host_records:
        moves.allocate_host(memory.host_records, memory.host_blocks)
    if memory.num_snapshots:
        moves.allocate_snapshots(memory.num_snapshots)
        if memory.prefix_host_records:
            moves.allocate_prefix_host(memory.prefix_host_records, memory.prefix_host_blocks)
    elif spec.config.prefix_cache:
        logger.warning("every prompt is prefilled from its beginning: no memory is left for a prefix cache")
    return moves


def _later(programs: Programs, depths: Sequence[int], saved: Path | None) -> LaterDepths | None:
    """The loader of these depths' programs from a cache while the engine works; None without depths."""
    if not depths:
        return None
    assert saved is not None
    later = [
        LaterProgram(shape.depth or 0, saved / shape.name, partial(programs.adopt, shape))
        for shape in programs.shapes_of(depths)
    ]
    device = programs.device if programs.device.type == "cuda" else None
    return LaterDepths(later, programs.step, lambda: programs.is_between_rounds, device)


def _load(
    spec: EngineSpec, progress: Progress | None, fill: Fill | None, tower_path: Path
) -> tuple[TargetModel, DraftModel | None, Encoder | None, int]:
    """All models with their weights, as steps read them, and the bytes that are free beside them."""
    before_bytes = _free_bytes(spec)
    target, draft = _load_model(spec, progress, fill)
    encoder = _load_tower(spec, fill, tower_path)
    if draft is not None:
        allocate = partial(allocate_draft, spec)
        draft = spec.drafts.quantize(draft, spec.model, spec.weight_formats, allocate)
    if spec.device.type == "cpu":
        pack_weights(target, draft, spec.model, spec.weight_formats, spec.communicator)
    free_bytes = _free_bytes(spec)
    if spec.device.type == "cuda":
        # As `inspect` predicts, unless loading took more.
        loaded = [target, draft, None if encoder is None else encoder.tower]
        beside = free_beside([model for model in loaded if model is not None], before_bytes)
        free_bytes = min(free_bytes, beside)
    return target, draft, encoder, free_bytes


def _load_model(
    spec: EngineSpec, progress: Progress | None, fill: Fill | None
) -> tuple[TargetModel, DraftModel | None]:
    if fill is None:
        vision = spec.model.vision
        tower = 0 if vision is None else weight_bytes(vision, spec.dtype)
        check_weights(
            spec.model,
            spec.config.model,
            spec.weight_formats,
            spec.dtype,
            with_mtp=spec.mtp_step > 0,
            # The vision tower is loaded after the model.
            free_bytes=_free_bytes(spec) - tower,
            rank=spec.rank,
            world=spec.world,
            prompt_rows=spec.prompt_rows,
            allow_extra=spec.config.allow_extra_tensors,
            lora=spec.config.lora,
        )
    arguments = (spec.model_shard, spec.dtype, spec.device, spec.weight_formats, spec.communicator)
    target = FAMILIES[spec.model.family].target(*arguments)
    draft = allocate_draft(spec, spec.weight_formats) if spec.mtp_step else None
    parameters = parameters_of(target, draft)
    if fill is not None:
        fill(parameters)
    else:
        load_weights(
            spec.model,
            spec.config.model,
            parameters,
            with_mtp=draft is not None,
            formats=spec.weight_formats,
            rank=spec.rank,
            world=spec.world,
            prompt_rows=spec.prompt_rows,
            allow_extra=spec.config.allow_extra_tensors,
            lora=spec.config.lora,
            # The check adds a third to a load from the page cache on a CPU, and a 25th on a GPU.
            is_checked=spec.device.type == "cuda" or spec.config.check_weights,
            progress=None if progress is None else partial(progress, "weights"),
        )
    if spec.device.type == "cuda":
        # Otherwise the next tensors would lie in the large segments of what loading no longer uses.
        torch.cuda.empty_cache()
    return target, draft


def _load_tower(spec: EngineSpec, fill: Fill | None, path: Path) -> Encoder | None:
    """The vision tower, whole on every rank; None for a model without images. With `fill` its weights are
    random: benchmarks ask for its time alone."""
    if spec.model.vision is None:
        return None
    if fill is None:
        tower = load_tower(
            spec.model.vision,
            path,
            spec.dtype,
            spec.device,
            is_checked=spec.device.type == "cuda" or spec.config.check_weights,
        )
    else:
        tower = random_tower(spec.model.vision, spec.dtype, spec.device)
    logger.info("%d MiB of vision tower", sum(p.nbytes for p in tower.parameters()) >> 20)
    return Encoder(tower)


def parameters_of(target: TargetModel, draft: DraftModel | None) -> dict[str, torch.Tensor]:
    """The parameters by the names of a layout."""
    models = ("", target), ("mtp.", draft)
    return {
        prefix + name: parameter.data
        for prefix, model in models
        if model is not None
        for name, parameter in model.named_parameters()
    }


def allocate_draft(spec: EngineSpec, formats: Formats) -> DraftModel:
    """This rank's MTP layer with parameters of these formats, which have no values yet."""
    draft = FAMILIES[spec.model.family].draft
    return draft(spec.model_shard, spec.dtype, spec.device, formats, spec.communicator)


@torch.no_grad()
def _make_step(spec: EngineSpec, memory: MemoryPlan, target: TargetModel, draft: DraftModel | None) -> Step:
    config, model, device = spec.config, spec.model_shard, spec.device
    slots, block_size = memory.num_state_rows, config.block_size
    # Before the caches are allocated: making the head takes more memory than the head itself.
    draft_head = spec.drafts.make_head(target.head_rows, device)
    kv_cache = KVCache(
        model,
        memory.num_blocks,
        block_size,
        spec.kv_dtype,
        device,
        with_draft=draft is not None,
        records_experts=config.routed_experts,
    )
    if kv_cache.experts is not None:
        blocks = [module for module in target.modules() if isinstance(module, MoE)]
        for moe, record in zip(blocks, kv_cache.experts, strict=True):
            moe.record = record
    slot_state = SlotState(
        slots,
        spec.max_drafts,
        -(-memory.max_model_len // block_size),
        model.hidden_size,
        model.vocab_size,
        spec.dtype,
        device,
        rows=spec.draft_rows(memory.max_model_len),
        num_forced=memory.max_model_len if config.scoring else 0,
    )
    return Step(
        target,
        draft,
        kv_cache,
        StateCache(model, slots, spec.max_drafts, spec.dtype, device, usual_drafts=spec.mtp_step),
        slot_state,
        rotary_table(model, memory.max_model_len, device),
        spec.mtp_step,
        spec.num_valid_ids,
        memory.max_model_len,
        config.synthetic_acceptance,
        draft_head,
        drafters=spec.drafters,
        has_images=spec.model.vision is not None,
    )


def make_buckets(spec: EngineSpec, target: TargetModel, max_batch: int) -> Buckets:
    """The decode shapes at whose batch sizes a row's bits do not depend on the others."""
    return buckets_of(spec, _row_unit(spec, target, max_batch), max_batch)


def _row_unit(spec: EngineSpec, target: TargetModel, max_batch: int) -> int:
    """The number of rows whose multiples are batch sizes at which a row's bits do not depend on the others.

    Warns where none is found.
    """
    if spec.device.type == "cuda":
        return 1
    units = (1, 2, 4, 8)
    each = [buckets_of(spec, unit, max_batch) for unit in units]
    row_counts = sorted({bucket.rows for buckets in each for bucket in buckets.every})
    weights = [*weights_of(target.modules()), *k_splits_of(target.modules())]
    if not target.is_head_packed:
        weights.append(target.head_weight)
    found = find_row_unit(weights, row_counts)
    # All ranks take the largest unit: units are powers of two, so it is a multiple of every rank's own.
    unit = -spec.agree(-(found or 2 * units[-1]))
    if unit > units[-1]:
        logger.warning(
            "this machine's matrix library computes a row to different bits when the other rows of its batch "
            "differ: tokens may depend on the batch and on mtp_step"
        )
        return units[-1]
    return unit


def _free_bytes(spec: EngineSpec) -> int:
    """Bytes that are free on this rank's device now, the same number on every rank; on a CPU its share."""
    if spec.device.type == "cuda":
        # torch holds on to memory that loading no longer uses, such as linears before their FP8 copies.
        torch.cuda.empty_cache()
        return spec.agree(free_device_bytes(spec.device))
    return _host_bytes(spec)


def _host_bytes(spec: EngineSpec) -> int:
    """This rank's share of the host's free bytes, the same number on every rank."""
    return spec.agree(available_bytes() // spec.world)
