"""`compiled-mtp inspect`: what a checkpoint's files hold, and how it would run on this machine.

    compiled-mtp inspect CHECKPOINT

Prints the family and the sizes, the formats of the weights by kind of module, whether the checkpoint has an
MTP head, which weights are multiplied out while they are loaded, and the memory that the weights take. Reads
only headers and scales, not the weights. If the engine would refuse the checkpoint, one line on standard
error says why, and the exit code is 2.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from compiled_mtp.config import EngineConfig
from compiled_mtp.frontend.hub import find_checkpoint
from compiled_mtp.model_config import ModelConfig, RopeScaling
from compiled_mtp.models.catalogue import read_stored
from compiled_mtp.models.draft_vocabulary import choose_draft_ids
from compiled_mtp.models.draft_weights import DraftPlan, plan_drafts
from compiled_mtp.models.headers import read_visual_headers
from compiled_mtp.models.hf_config import read_model_config
from compiled_mtp.models.lora import read_adapter
from compiled_mtp.models.stored_weight import StoredWeight
from compiled_mtp.models.weight_format import (
    FP8,
    describe_kept,
    describe_recipe,
    packed_names,
    resolve_recipe,
)
from compiled_mtp.models.weights import check_weights, count_weights, multiplied_out, read_formats
from compiled_mtp.runner.device_memory import free_device_bytes
from compiled_mtp.runner.host_memory import available_bytes
from compiled_mtp.runner.spec import resolve_device
from compiled_mtp.terminal.console import EXIT_OK, check_stdout, run_command, write_text
from compiled_mtp.terminal.flags import Parser

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
    return run_command(lambda _: _inspect(make_parser().parse_args(argv)))


def make_parser() -> Parser:
    """Return the flags."""
    parser = Parser(
        prog="compiled-mtp inspect",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = EngineConfig()
    described = "a directory, or a repository of the Hub such as Qwen/Qwen3.5-4B; default: the one that ships"
    parser.add_argument("checkpoint", nargs="?", default=str(default.model), help=described)
    parser.add_argument("--device", default=default.device, help="auto, cpu or cuda (default: %(default)s)")
    parser.add_argument("--lora", type=Path, help=EngineConfig.model_fields["lora"].description)
    return parser


def _inspect(flags: argparse.Namespace) -> int:
    stdout = check_stdout()
    config = EngineConfig(model=flags.checkpoint, device=flags.device, lora=flags.lora)
    path = find_checkpoint(config.model, is_offline=config.offline)
    model = read_model_config(path)
    weights = read_stored(path)
    lines = (*describe_model(model), *describe_files(weights), *describe_tower(path))
    write_text(stdout, "".join(f"{line}\n" for line in lines))
    # Last: this raises ValueError for a checkpoint that the engine refuses.
    write_text(stdout, "".join(f"{line}\n" for line in describe_run(config, model, path, weights)))
    return EXIT_OK


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
        yield f"stored      {kind}: {counts[kind, form]} in {form}, {_mib(size)}"


def describe_tower(path: Path) -> Iterator[str]:
    """Yield a line on the vision tower, if one is stored."""
    headers = {} if path.suffix == ".gguf" else read_visual_headers(path)
    if headers:
        size = sum(header.num_bytes for header in headers.values())
        yield f"vision      {len(headers)} weights of {_mib(size)}, which max_images loads"


def describe_run(
    config: EngineConfig, model: ModelConfig, path: Path, weights: Mapping[str, StoredWeight]
) -> Iterator[str]:
    """Yield lines on how the weights run and the memory they take. Raises ValueError if they are refused."""
    device = resolve_device(config.device)
    dtype = getattr(torch, config.resolve_dtype(device.type, model))
    recipe = resolve_recipe(config.weight_recipe, has_fp8=model.quantized, device=device)
    formats = read_formats(model, path, device, recipe, dtype, config.tensor_parallel)
    with_mtp = bool(model.mtp_num_layers)
    free = free_device_bytes(device) if device.type == "cuda" else available_bytes()
    drafts = DraftPlan()
    if with_mtp:
        ids = choose_draft_ids(config.draft_vocab, model.vocab_size, model.eos_token_ids)
        world, asked = config.tensor_parallel, config.draft_dtype
        drafts = plan_drafts(asked, model, ids, formats, dtype=dtype, device=device, world=world)
    head_bytes = drafts.head_bytes(model.vocab_size, model.hidden_size, dtype.itemsize)
    in_memory = drafts.formats(model, formats)
    needed = count_weights(model, weights, in_memory, dtype, with_mtp=with_mtp) + head_bytes
    kept: dict[str, list[str]] = {}
    for parameter, form in formats.items():
        if form.has_factors:
            for name in packed_names(form) if form.is_packed else ("FP8",):
                kept.setdefault(name, []).append(parameter)
    packed = multiplied_out(model, weights, formats)
    name = str(dtype).removeprefix("torch.")
    yield f"runs        on {device.type}, in {name}{describe_recipe(recipe, formats)}"
    for kind, names in kept.items():
        yield f"kept        {describe_kept(names)} in {kind}"
    if packed:
        before = sum(weight.num_bytes for weight in packed)
        yield f"multiplied  {len(packed)} weights of {_mib(before)}, while they are loaded"
    if described := drafts.describe(head_bytes).removeprefix(", drafts "):
        yield f"drafts      {described}"
    yield f"memory      {_mib(needed)} of weights, {_mib(free)} free; caches come on top"
    if config.lora is not None:
        yield f"adapter     {read_adapter(config.lora).describe()}"
    check_weights(model, path, formats, dtype, with_mtp=with_mtp, free_bytes=free, lora=config.lora)


def _kind_of(name: str) -> str:
    return next(kind for kind, pattern in _KINDS.items() if re.search(pattern, name))


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
