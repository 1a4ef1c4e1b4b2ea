"""What several ranks cannot do, refused before any is started."""

from __future__ import annotations

import pickle

import torch

from compiled_mtp.build import Fill
from compiled_mtp.build_settings import resolve_device
from compiled_mtp.config import EngineConfig
from compiled_mtp.errors import check, fail
from compiled_mtp.graph_choice import choose_compiled
from compiled_mtp.model_config import ModelConfig
from compiled_mtp.models.weight_format import resolve_recipe
from compiled_mtp.ops.shares import CPU_SHARES, share_count


def check_ranks(config: EngineConfig, model_config: ModelConfig, fill: Fill | None) -> None:
    """Raise ValueError for what several ranks cannot do."""
    world, device = config.tensor_parallel, resolve_device(config.device)
    rule, remedy = "be a function that ranks can import", "define it at the top of a module on their path"
    # A rank's own is another.
    check(getattr(fill, "__module__", None) != "__main__", "fill", rule, fill, remedy)
    try:
        pickle.dumps(fill)
    except (AttributeError, pickle.PicklingError):
        raise fail("fill", rule, fill, remedy) from None
    recipe = resolve_recipe(config.weight_recipe, has_fp8=model_config.quantized, device=device)
    remedy = "pass weight_recipe=w8a16"
    check(recipe != "w8a8", "weight_recipe", "be w8a16 with several ranks", config.weight_recipe, remedy)
    is_plain = config.draft_head_dtype == "auto"
    check(is_plain, "draft_head_dtype", "be auto with several ranks", config.draft_head_dtype, "leave it out")
    if device.type == "cpu":
        # On GPUs the start captures every depth; here a process would compile them for one rank.
        is_fixed = config.mtp_step != "auto" or not choose_compiled(config, device)
        rule, remedy = "be a number with several ranks that compile", "pass a number, or compile=off"
        check(is_fixed, "mtp_step", rule, config.mtp_step, remedy)
        rule = f"be at most {CPU_SHARES} on a CPU"
        check(world <= CPU_SHARES, "tensor_parallel", rule, world, "use fewer ranks")
        is_gloo = config.exchange in ("auto", "gloo")
        check(is_gloo, "exchange", "be auto or gloo on a CPU", config.exchange, "leave it out")
    model_config.shard(0, world)
    if device.type == "cuda":
        _check_gpus(config, model_config, device)


def _check_gpus(config: EngineConfig, model: ModelConfig, device: torch.device) -> None:
    world, there = config.tensor_parallel, torch.cuda.device_count()
    rule = f"be at most the {there} GPUs that are there"
    check(world <= there, "tensor_parallel", rule, world, "use fewer ranks")
    remedy = "leave the first GPU current, and choose GPUs by CUDA_VISIBLE_DEVICES"
    check(device.index == 0, "device", "be the first GPU with several ranks", device, remedy)
    check(config.exchange != "gloo", "exchange", "be symmetric or nccl on GPUs", "gloo", "leave it out")
    is_replay = config.graph_mode in ("auto", "replay")
    remedy = "leave it out"
    check(is_replay, "graph_mode", "be replay with several ranks", config.graph_mode, remedy)
    # Without graphs kernels are compiled where a step first launches them, while the others wait.
    rule = "be empty with several ranks on GPUs"
    check(not config.reference_ops, "reference_ops", rule, config.reference_ops, remedy)
    # Summed over a row's experts in one program, which knows no shares.
    remedy = "pass tensor_parallel=1"
    check(not model.is_moe, "tensor_parallel", "be 1 for a mixture of experts on GPUs", world, remedy)
    # A group of query heads is a tile: what decides its bits must not change.
    for name in ("num_kv_heads", "linear_num_key_heads"):
        count, rule = getattr(model, name), f"be a multiple of {world} ranks on GPUs"
        check(count % world == 0, name, rule, count, "use fewer ranks")
    columns = {
        "num_q_heads": model.num_q_heads * model.head_dim,
        "linear_num_value_heads": model.linear_value_dim,
        "intermediate_size": model.intermediate_size,
    }
    for name, width in columns.items():
        shares, rule = share_count(width), f"be summed in {world} shares at least"
        check(shares >= world, name, rule, f"{shares} of {width} columns", "use fewer ranks")
