"""`compiled-mtp inspect`: what a checkpoint's files contain, and how it would run on this machine.

    compiled-mtp inspect CHECKPOINT
    compiled-mtp inspect CHECKPOINT --memory-gib 24 --max-batch 4

Prints the family and the sizes, the formats of the weights by kind of module, whether the checkpoint has an
MTP head, which weights are multiplied out while they are loaded, the memory that the weights take, and the
slots and tokens that the caches of an engine with the same flags would have. Reads only headers and scales,
not the weights. If the engine would refuse the checkpoint, one line on standard error says why, and the exit
code is 2.
"""

from __future__ import annotations

import argparse
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from compiled_mtp.config import EngineConfig
from compiled_mtp.errors import check
from compiled_mtp.frontend.hub import find_checkpoint
from compiled_mtp.model_config import ModelConfig, RopeScaling
from compiled_mtp.models.catalogue import read_stored
from compiled_mtp.models.headers import read_visual_headers
from compiled_mtp.models.hf_config import read_model_config
from compiled_mtp.models.lora import read_adapter
from compiled_mtp.models.stored_weight import StoredWeight
from compiled_mtp.models.weight_format import (
    FP8,
    describe_kept,
    describe_recipe,
    kept_by_name,
)
from compiled_mtp.models.weights import check_weights, multiplied_out
from compiled_mtp.ops.device import GPU, assume, is_assumed, memory_of
from compiled_mtp.runner.device_memory import free_device_bytes
from compiled_mtp.runner.forecast import draft_head_bytes, forecast, parameter_bytes
from compiled_mtp.runner.host_memory import available_bytes
from compiled_mtp.runner.memory_plan import MemoryPlan, mib
from compiled_mtp.runner.spec import EngineSpec, resolve
from compiled_mtp.terminal.console import EXIT_OK, check_stdout, run_command, write_text
from compiled_mtp.terminal.flags import COMMON_ENGINE, Parser, add_fields, given

# `checkpoint` is the model.
_SKIPPED = ("model",)
# A weight's kind is the first whose pattern matches its name.
_KINDS: Mapping[str, str] = {
    "embedding and head": r"^(embed_tokens|lm_head)\.",
    "experts": r"\.mlp\.(experts|shared_expert)\.",
    "FFN": r"\.mlp\.(gate|up|down)_proj\.",
    "attention": r"\.self_attn\.[qkvo]_proj\.",
    "GDN": r"\.linear_attn\.(in_proj|out_proj)",
    "norms, gates and the rest": "",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0, 2 for a refused checkpoint, 130 for Ctrl-C or 143 for SIGTERM."""
    return run_command(lambda _: _inspect(make_parser().read(argv)))


def make_parser() -> Parser:
    """Return the flags."""
    parser = Parser(
        prog="compiled-mtp inspect",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    described = (
        "a directory, a GGUF file, or a repository of the Hub such as Qwen/Qwen3.5-4B; default: the "
        "checkpoint that ships"
    )
    parser.add_argument("checkpoint", nargs="?", help=described)
    parser.add_argument(
        "--memory-gib",
        type=_gib,
        metavar="N",
        help="predict for a GPU on which the engine may take N GiB: a card's size, less about 0.6 for CUDA",
    )
    parser.add_argument(
        "--compute-capability",
        type=_capability,
        metavar="X.Y",
        help="of that GPU: 8.6 for an RTX 3090, 8.9 for an RTX 4090, 9.0 for an H100 (default: that of the "
        "GPU here, else 9.0)",
    )
    add_fields(parser, "engine", EngineConfig, skip=_SKIPPED, common=COMMON_ENGINE)
    return parser


def _gib(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise ValueError(text)
    return number


def _capability(text: str) -> tuple[int, int]:
    major, minor = text.split(".")
    return int(major), int(minor)


# argparse puts these names into its errors.
_gib.__name__, _capability.__name__ = "GiB", "compute capability"


def _inspect(flags: dict[str, Any]) -> int:
    stdout = check_stdout()
    gpu = _asked_gpu(flags)
    checkpoint = {} if flags["checkpoint"] is None else {"model": flags["checkpoint"]}
    config = EngineConfig(**given(flags, EngineConfig, skip=_SKIPPED), **checkpoint)
    path = find_checkpoint(config.model, is_offline=config.offline)
    model = read_model_config(path, max_pixels=config.vision_pixels)
    weights = read_stored(path)
    lines = (*describe_model(model), *describe_files(weights), *describe_tower(path))
    write_text(stdout, "".join(f"{line}\n" for line in lines))
    # Last: this raises ValueError for a checkpoint that the engine refuses.
    with assume(gpu):
        for line in describe_run(config.settle(model, path), model, path, weights):
            write_text(stdout, f"{line}\n")
    return EXIT_OK


def _asked_gpu(flags: Mapping[str, Any]) -> GPU | None:
    """The GPU that the flags describe; None for the machine's own devices."""
    gib, capability = flags["memory_gib"], flags["compute_capability"]
    if gib is None:
        remedy = "give both, or neither for the devices here"
        check(capability is None, "compute-capability", "come with --memory-gib", "it alone", remedy)
        return None
    device = flags.get("device", "cuda")
    check(device != "cpu", "device", "be cuda, or left out, beside --memory-gib", device, "leave it out")
    if capability is None:
        capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    return GPU(capability, int(gib * 2**30))


def describe_model(model: ModelConfig) -> Iterator[str]:
    """Yield lines on the family and the sizes."""
    attention = sum(model.is_full_attention)
    yield f"family      {model.family}, stored as {model.dtype}"
    yield f"layers      {model.num_layers}: {attention} of attention, {model.num_layers - attention} of GDN"
    yield f"sizes       hidden {model.hidden_size}, vocabulary {model.vocab_size}"
    yield f"context     {model.max_position_embeddings} tokens{_describe_scaling(model.rope_scaling)}"
    if model.is_moe:
        experts = f"{model.num_experts} experts of {model.moe_intermediate_size}"
        yield f"experts     {experts}, {model.num_experts_per_tok} per token"
    yield f"MTP head    {'stored' if model.mtp_num_layers else 'none: it decodes without drafts'}"


def _describe_scaling(scaling: RopeScaling | None) -> str:
    if scaling is None:
        return ""
    return f", with rope scaling {scaling.kind}, {scaling.factor:g} times {scaling.original_length}"


def describe_files(weights: Mapping[str, StoredWeight]) -> Iterator[str]:
    """Yield a line for each kind of weight and format: how many are stored, and their bytes."""
    counts: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for name, weight in weights.items():
        # The bytes of an FP8 weight's factors count with the weight.
        is_scale = name.endswith(FP8.scale_suffix)
        of = name.removesuffix(FP8.scale_suffix)
        kind = "MTP head" if name.startswith("mtp.") else _kind_of(name)
        form = FP8.name if f"{of}{FP8.scale_suffix}" in weights else weight.dtype
        counts[kind, form] += not is_scale
        sizes[kind, form] += weight.num_bytes
    for (kind, form), size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        yield f"stored      {kind}: {counts[kind, form]} in {form}, {mib(size)}"


def describe_tower(path: Path) -> Iterator[str]:
    """Yield a line on the vision tower, if one is stored."""
    headers = {} if path.suffix == ".gguf" else read_visual_headers(path)
    if headers:
        size = sum(header.num_bytes for header in headers.values())
        yield f"vision      {len(headers)} weights of {mib(size)}, which max_images loads"


def describe_run(
    config: EngineConfig, model: ModelConfig, path: Path, weights: Mapping[str, StoredWeight]
) -> Iterator[str]:
    """Yield lines on how the weights run, the memory they take, and the caches that fit beside them.

    The device is the machine's, or that of `assume`. Raises ValueError for what an engine would refuse.
    """
    spec = resolve(config, model, model.vocab_size)
    formats, drafts = spec.weight_formats, spec.drafts
    packed = multiplied_out(model, weights, formats)
    name = str(spec.dtype).removeprefix("torch.")
    yield f"runs        on {spec.device.type}, in {name}{describe_recipe(spec.weight_recipe, formats)}"
    for kind, names in kept_by_name(formats).items():
        yield f"kept        {describe_kept(names)} in {kind}"
    if packed:
        before = sum(weight.num_bytes for weight in packed)
        yield f"multiplied  {len(packed)} weights of {mib(before)}, while they are loaded"
    world = config.tensor_parallel
    head_bytes = draft_head_bytes(spec, model.vocab_size // world)
    if described := drafts.describe(head_bytes).removeprefix(", drafts "):
        yield f"drafts      {described}"
    if config.lora is not None:
        yield f"adapter     {read_adapter(config.lora).describe()}"
    needed, free = parameter_bytes(spec) + head_bytes, _free_bytes(spec)
    each = f" on each of {world} ranks" if world > 1 else ""
    yield f"memory      {mib(needed)} of weights{each}, {mib(free)} free"
    sizes: dict[str, Any] = {"with_mtp": spec.mtp_step > 0, "free_bytes": free, "world": world}
    check_weights(model, path, formats, spec.dtype, **sizes, lora=config.lora)
    memory = forecast(spec, free_bytes=free, host_bytes=available_bytes() // world)
    yield from describe_caches(spec, memory)


def describe_caches(spec: EngineSpec, memory: MemoryPlan) -> Iterator[str]:
    """Yield lines on the caches: the slots, and the tokens of all requests together and of one."""
    blocks, size = memory.num_blocks - 1, spec.config.block_size
    caches = f"{memory.max_batch} slots, {blocks * size} tokens in {blocks} blocks"
    yield f"caches      {caches}, {memory.num_snapshots} state snapshots: {mib(memory.total_bytes)}"
    yield f"request     at most {memory.max_model_len} tokens of the checkpoint's {spec.max_model_len}"


def _free_bytes(spec: EngineSpec) -> int:
    """What an engine finds free of its device."""
    if spec.device.type == "cpu":
        return available_bytes() // spec.config.tensor_parallel
    return memory_of(spec.device) if is_assumed() else free_device_bytes(spec.device)


def _kind_of(name: str) -> str:
    return next(kind for kind, pattern in _KINDS.items() if re.search(pattern, name))
