"""Refuses what several ranks cannot do before any rank starts."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch

from compiled_mtp.errors import check, fail
from compiled_mtp.graphs.artifacts import check_key
from compiled_mtp.models.catalogue import read_stored
from compiled_mtp.models.family import FAMILIES
from compiled_mtp.models.shards import shard_layout, with_prompt_rows
from compiled_mtp.ops.fp8 import FP8_BLOCK
from compiled_mtp.ops.k_splits import CPU_K_SPLITS, count_k_splits
from compiled_mtp.runner.assemble import Fill
from compiled_mtp.runner.spec import EngineSpec


def check_ranks(spec: EngineSpec, fill: Fill | None) -> None:
    """Raise ValueError for what several ranks cannot do. spec: of the whole engine."""
    config, device = spec.config, spec.device
    world = config.tensor_parallel
    rule, remedy = "be a function that ranks can import", "define it at the top of a module on their path"
    # The `__main__` of a rank's process is another module.
    check(getattr(fill, "__module__", None) != "__main__", "fill", rule, fill, remedy)
    try:
        pickle.dumps(fill)
    except (AttributeError, pickle.PicklingError):
        raise fail("fill", rule, fill, remedy) from None
    if spec.cache is not None:
        check_key(spec.cache, {"tensor_parallel": world}, is_whole=False)
    if device.type == "cpu":
        rule = f"be at most {CPU_K_SPLITS} on a CPU"
        check(world <= CPU_K_SPLITS, "tensor_parallel", rule, world, "use fewer ranks")
        is_gloo = config.communicator in ("auto", "gloo")
        check(is_gloo, "communicator", "be auto or gloo on a CPU", config.communicator, "leave it out")
    spec.model.shard(0, world)
    if device.type == "cuda":
        _check_gpus(spec)
    _check_sums(spec, None if fill is not None else config.model)


def _check_gpus(spec: EngineSpec) -> None:
    config, device = spec.config, spec.device
    world, there = config.tensor_parallel, torch.cuda.device_count()
    rule = f"be at most the {there} GPUs that are there"
    check(world <= there, "tensor_parallel", rule, world, "use fewer ranks")
    remedy = "leave the first GPU current, and choose GPUs by CUDA_VISIBLE_DEVICES"
    check(device.index == 0, "device", "be the first GPU with several ranks", device, remedy)
    check(
        config.communicator != "gloo", "communicator", "be symmetric or nccl on GPUs", "gloo", "leave it out"
    )
    is_replay = config.graph_mode in ("auto", "replay")
    remedy = "leave it out"
    check(is_replay, "graph_mode", "be replay with several ranks", config.graph_mode, remedy)
    # Without graphs a rank would compile kernels inside a step, at their first launch, while others wait.
    rule = "be empty with several ranks on GPUs"
    check(not config.reference_ops, "reference_ops", rule, config.reference_ops, remedy)


def _check_sums(spec: EngineSpec, path: Path | None) -> None:
    """Raise ValueError for sums with fewer K splits than ranks, and for shards that cut blocks or groups."""
    world, is_gpu = spec.config.tensor_parallel, spec.device.type == "cuda"
    model, formats = spec.model, spec.weight_formats
    if formats:
        layout = FAMILIES[model.family].layout(model, {} if path is None else read_stored(path), formats)
        given = with_prompt_rows(formats) if is_gpu else formats
        for rank in range(world):
            shard_layout(layout, model, given, rank, world, prompt_rows=is_gpu)
    # Experts have no K splits: each rank computes whole sums of some of down's rows.
    if is_gpu or model.is_moe:
        hidden, rule = model.hidden_size, f"be a multiple of {world} ranks"
        check(hidden % world == 0, "hidden_size", rule, hidden, "use another number of ranks")
    columns = {
        "num_q_heads": model.num_q_heads * model.head_dim,
        "linear_num_value_heads": model.linear_value_dim,
    }
    if not model.is_moe:
        columns["intermediate_size"] = model.intermediate_size
    for name, width in columns.items():
        # On a CPU the K splits of products that are not quantised may have any length.
        if is_gpu or (spec.weight_recipe == "w8a8" and width % FP8_BLOCK == 0):
            k_splits, rule = count_k_splits(width), f"have at least {world} K splits"
            check(k_splits >= world, name, rule, f"{k_splits} of {width} columns", "use fewer ranks")
