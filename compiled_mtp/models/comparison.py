"""Checks that a checkpoint's files hold the tensors that its config.json describes, with readable errors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from compiled_mtp.errors import check, shown
from compiled_mtp.model_config import ModelConfig
from compiled_mtp.models.family import FAMILIES
from compiled_mtp.models.headers import Header, stored_name
from compiled_mtp.models.layout import Stored, with_scales
from compiled_mtp.models.stored import HEAD
from compiled_mtp.models.stored_weight import StoredWeight
from compiled_mtp.models.weight_format import FP8, NO_FORMATS, Formats, WeightFormat
from compiled_mtp.ops.blocks import UNIT

_FLOATS = ("BF16", "F16", "F32")
_SCALES = ("BF16", "F32")
# The most names of each kind that a message lists.
_FEW = 5
# Parts of the names of tensors that PEFT saves.
_ADAPTER_MARKS = (".lora_", ".base_layer.", ".modules_to_save.")


def checked_layout(
    config: ModelConfig,
    path: str | Path,
    headers: Mapping[str, StoredWeight],
    formats: Formats,
    with_mtp: bool,
    allow_extra: bool,
) -> tuple[dict[str, Stored], list[str]]:
    """Check the files in `path` against the whole model's layout; return that without factors, and the unused
    tensors.

    with_mtp False leaves the MTP head out of the layout. allow_extra permits unused tensors. Raises
    ValueError that names the first tensors that are missing, unused, or of another shape or dtype.
    """
    if with_mtp and not any(name.startswith("mtp.") for name in headers):
        raise ValueError(f"model must store an MTP head (mtp.* tensors), got none in {path}; pass mtp_step=0")
    check_counts(config, headers)
    layout = FAMILIES[config.family].layout(config, headers, formats)
    required = [n for n in with_scales(layout, formats) if with_mtp or not n.startswith("mtp.")]
    # `as_stored` has found that a tied model's stored head equals its embedding.
    used = {n: h for n, h in headers.items() if not (config.tie_word_embeddings and n == HEAD)}
    unused, misfitting, without_scale = _compare(layout, used)
    missing = list(dict.fromkeys([n for n in required if n not in headers] + without_scale))
    refused = [] if allow_extra else unused
    kinds = (
        ("missing", [stored_name(name, headers) for name in missing]),
        ("unused", refused),
        ("misfitting", misfitting),
    )
    problems = [f"{kind} tensors: {first_few(names)}" for kind, names in kinds if names]
    if problems:
        raise _misfit(problems, path, _common_cause(missing, misfitting, unused))
    return {n: stored for n, stored in layout.items() if with_mtp or not n.startswith("mtp.")}, unused


def check_counts(config: ModelConfig, headers: Mapping[str, StoredWeight]) -> None:
    """Raise ValueError if config.json's numbers of layers, experts or value heads do not fit the files.

    Checked first, because a wrong number would make a huge layout.
    """
    parts = [name.split(".", 2) for name in headers if name.startswith("layers.")]
    num_layers = len({part[1] for part in parts})
    if num_layers:
        rule = f"be the number of stored layers ({num_layers})"
        remedy = "fix config.json or download the missing files"
        if config.num_layers < num_layers:
            remedy = "fix config.json or remove the other layers: allow_extra_tensors skips no layer"
        check(config.num_layers == num_layers, "num_hidden_layers", rule, config.num_layers, remedy)
    for field, suffix in (("num_experts", ".mlp.gate.weight"), ("linear_num_value_heads", ".A_log")):
        rows = [h.shape[0] for name, h in headers.items() if name.endswith(suffix) and h.shape]
        rule = f"be at most {max(rows, default=len(headers))}, as stored"
        count = getattr(config, field)
        check(count <= max(rows, default=len(headers)), field, rule, count, "fix config.json")


def _compare(
    layout: Mapping[str, Stored], headers: Mapping[str, StoredWeight]
) -> tuple[list[str], list[str], list[str]]:
    """Return the names of unused tensors, of misfitting ones, and of factors that stored weights lack."""
    unused, wrong, without_scale = [], [], []
    for name, header in headers.items():
        weight = name.removesuffix(FP8.scale_suffix)
        is_scale = weight != name
        if weight not in layout or weight not in headers:
            unused.append(header.name)
            continue
        stored = layout[weight]
        has_scale = name + FP8.scale_suffix in headers
        if header.dtype == FP8.header_dtype and not is_scale and not has_scale:
            without_scale.append(name + FP8.scale_suffix)
            continue
        shape = stored.shape
        dtypes: tuple[str, ...] = _FLOATS
        if is_scale:
            shape, dtypes = FP8.scale_shape(shape), _SCALES
        elif has_scale and len(shape) == 2:  # No release stores stacked experts with scales.
            dtypes = (FP8.header_dtype,)
        if header.shape != shape:
            wrong.append(f"{shown(header.name)} of shape {shown(list(header.shape))} for {list(shape)}")
        elif isinstance(header, Header) and header.dtype not in dtypes:
            wrong.append(f"{shown(header.name)} of dtype {shown(header.dtype)} for {' or '.join(dtypes)}")
    return unused, wrong, without_scale


def check_parameters(
    layout: Mapping[str, Stored],
    parameters: Mapping[str, torch.Tensor],
    path: str | Path,
    formats: Formats = NO_FORMATS,
) -> None:
    """Raise ValueError, naming the first parameters, if `layout` does not fill all `parameters` exactly."""
    packed = {name: form for name, form in formats.items() if form.is_packed and name in parameters}
    parameters = {
        name: _codes_of(parameter, packed[name]) if name in packed else parameter
        for name, parameter in parameters.items()
        if name.removesuffix("_scale") == name or name.removesuffix("_scale") not in packed
    }
    filled = dict.fromkeys(parameters, 0)
    wrong = []
    for stored in layout.values():
        # The parameter of a convolution's weight [C, 1, 4] is [C, 4].
        is_conv = len(stored.shape) == 3 and not stored.is_stack
        row = stored.shape[2:] if stored.is_stack or is_conv else stored.shape[1:]
        for shard in stored.shards:
            width = row if shard.columns is None else (shard.columns[1] - shard.columns[0],)
            have = parameters.get(shard.parameter)
            if have is None or tuple(have.shape)[1 if shard.expert is None else 2 :] != width:
                wrong.append(shard.parameter)
            else:
                count = stored.shape[0] if stored.is_stack else 1
                filled[shard.parameter] += count * shard.rows * math.prod(width)
    wrong += [name for name, count in filled.items() if count != parameters[name].numel()]
    if wrong:
        raise _misfit([f"parameters that do not fit: {first_few(dict.fromkeys(wrong))}"], path)


def _codes_of(words: torch.Tensor, form: WeightFormat) -> torch.Tensor:
    """A meta tensor with the shape of the codes in `words`."""
    if form.parts and words.dim() == 3:
        return torch.empty((*words.shape[:-1], form.parts[0].kind.columns(words.shape[-1])), device="meta")
    if form.parts:
        rows = sum(part.rows for part in form.parts)
        per_unit = sum(part.rows * part.kind.words for part in form.parts)
        return torch.empty((rows, words.numel() // per_unit * UNIT), device="meta")
    return torch.empty((*words.shape[:-1], words.shape[-1] * 4), device="meta")


def _common_cause(missing: list[str], misfitting: list[str], unused: list[str]) -> str:
    """The likely cause of the mismatch and its remedy; empty if neither is known."""
    if any(mark in name for name in unused for mark in _ADAPTER_MARKS):
        return "these are an adapter's: pass the base model, and PEFT's save of the adapter as lora"
    wanted = set(missing)
    for name in unused:
        parts = name.split(".")
        for cut in range(1, len(parts)):
            if ".".join(parts[cut:]) in wanted:
                prefix = ".".join(parts[:cut])
                owner = "PEFT's" if prefix.startswith("base_model.model") else "a wrapper's"
                return f"the names begin with {shown(prefix)}., {owner}: save the model without it"
    if missing == [HEAD]:
        return "if its head is tied to the embedding, set tie_word_embeddings to true in config.json"
    is_whole = not missing and not misfitting
    return "remove them, or pass allow_extra_tensors to skip them" if is_whole else ""


def first_few(names: Iterable[str]) -> str:
    """The first names as text, with the number of the others."""
    names = list(names)
    few = ", ".join(map(shown, names[:_FEW]))
    return few if len(names) <= _FEW else f"{few} and {len(names) - _FEW} more"


def _misfit(problems: list[str], path: str | Path, cause: str = "") -> ValueError:
    remedy = cause or "download the checkpoint again or use one of a supported family"
    return ValueError(
        f"model must hold exactly the tensors that its config.json describes, got {'; '.join(problems)} "
        f"in {path}; {remedy}"
    )
