"""Replaces an engine's weights in place, and makes everything again that was derived from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch

from compiled_mtp.errors import check
from compiled_mtp.models.catalogue import check_packed, is_packed, read_stored
from compiled_mtp.models.comparison import checked_layout, first_few
from compiled_mtp.models.given import Manifest, given_weights
from compiled_mtp.models.hf_config import read_model_config
from compiled_mtp.models.packing import pack_weights
from compiled_mtp.models.shards import with_prompt_rows
from compiled_mtp.models.stored_weight import StoredWeight
from compiled_mtp.models.weight_format import FP8
from compiled_mtp.models.weights import load_weights, read_formats
from compiled_mtp.ops.kept import forget_kept
from compiled_mtp.runner.assemble import Progress, allocate_draft, parameters_of
from compiled_mtp.runner.cache_key import traced
from compiled_mtp.runner.spec import EngineSpec
from compiled_mtp.step import Step

WeightSource: TypeAlias = str | Path | tuple[Manifest, Iterable[tuple[str, torch.Tensor]]]
"""A checkpoint's directory or GGUF file; or a manifest, and the tensors in its order."""


@dataclass(frozen=True)
class WeightUpdate:
    """Weights that fit the engine. path: where they lie, None for given ones. copied: called with the name of
    each tensor once it is copied."""

    weights: Mapping[str, StoredWeight]
    path: Path | None = None
    copied: Callable[[str], None] | None = None


def check_update(spec: EngineSpec, source: WeightSource) -> WeightUpdate:
    """Compare new weights with the engine's before any is copied: names, shapes, dtypes, formats, config.

    Raises ValueError that names what differs.
    """
    lora, remedy = spec.config.lora, "make an engine of the merged model without lora"
    check(lora is None, "lora", "be left out of an engine whose weights change", lora, remedy)
    if isinstance(source, tuple):
        weights, stream = given_weights(*source)
        _check_given(spec, weights)
        update = WeightUpdate(weights, copied=stream.release)
    else:
        path = Path(source)
        # The vision tower stays, and a trainer's directory need not say how images are prepared.
        config, own = read_model_config(path), replace(spec.model, vision=None)
        for name, value in traced(own).items():
            got = traced(config)[name]
            check(got == value, name, f"be {value}, as in the engine's weights", got, "make another engine")
        update = WeightUpdate(read_stored(path), path)
        _check_formats(spec, path)
        # FP8 in blocks has a recipe, which an engine of other weights has not resolved.
        rule, is_alike = "be stored in the formats of the engine's weights", config.quantized == own.quantized
        check(is_alike, "weights", rule, f"FP8 in blocks in {path}", "make another engine")
        check_packed(update.weights.values())
    checked_layout(
        spec.model,
        update.path or "the manifest",
        update.weights,
        spec.weight_formats,
        spec.mtp_step > 0,
        spec.config.allow_extra_tensors,
    )
    return update


@torch.no_grad()
def replace_weights(spec: EngineSpec, step: Step, update: WeightUpdate, progress: Progress | None) -> None:
    """Copy the weights into the step's parameters, whose addresses stay, and derive the others again.

    Every rank calls it with the same files. No launch may run. Mutates the parameters, the draft head, what
    operators keep of weights, and a CPU's packed weights. After any exception the weights are of no use.
    """
    target, draft = step.target, step.draft
    loaded = draft
    if draft is not None and spec.drafts.has_fp8_linears and not spec.drafts.is_multiplied_out:
        # The stored values of linears that drafts read in FP8, until they are rounded.
        loaded = allocate_draft(spec, spec.weight_formats)
    load_weights(
        spec.model,
        update.path or "the given weights",
        parameters_of(target, loaded),
        with_mtp=draft is not None,
        formats=spec.weight_formats,
        rank=spec.rank,
        world=spec.world,
        prompt_rows=spec.prompt_rows,
        allow_extra=spec.config.allow_extra_tensors,
        is_checked=True,
        progress=None if progress is None else partial(progress, "weights"),
        weights=update.weights,
        copied=update.copied,
    )
    if draft is not None and loaded is not None:
        spec.drafts.quantize(loaded, spec.model, spec.weight_formats, lambda _: draft)
    _derive(spec, step)


def _derive(spec: EngineSpec, step: Step) -> None:
    """Make the draft head, and on a CPU the packed weights, of the step's parameters again."""
    target, draft = step.target, step.draft
    head = spec.drafts.make_head(target.head_rows, spec.device)
    for own, made in ((step.draft_head, head.weight), (step.draft_head_scale, head.scale)):
        if own is not None and made is not None and own is not made:
            own.copy_(made)
    for weight in (*step.parameters(), *step.buffers()):
        forget_kept(weight)
    if spec.device.type == "cpu":
        pack_weights(target, draft, spec.model, spec.weight_formats, spec.communicator)


def _check_formats(spec: EngineSpec, path: Path) -> None:
    """Raise ValueError unless the files in `path` store every weight in the engine's format."""
    found = read_formats(spec.model, path, spec.device, spec.weight_recipe, spec.dtype, spec.world)
    if spec.prompt_rows:
        found = with_prompt_rows(found)
    own = spec.weight_formats
    differ = sorted(name for name in own.keys() | found.keys() if own.get(name) != found.get(name))
    rule = "be stored in the formats of the engine's weights"
    check(not differ, "weights", rule, f"others for {first_few(differ)}", "make another engine")


def _check_given(spec: EngineSpec, weights: Mapping[str, StoredWeight]) -> None:
    """Raise ValueError unless given tensors are plain, or FP8 exactly where the engine's checkpoint is."""
    check(spec.world == 1, "weights", "be a directory with several ranks", "tensors", "save them first")
    stored = read_stored(spec.config.model)
    packed = sorted(name for name, weight in stored.items() if is_packed(weight))
    rule = "be a directory for a quantised checkpoint"
    check(not packed, "weights", rule, f"tensors for {first_few(packed)}", "save them first")
    own, given = (
        {name for name, weight in every.items() if weight.dtype == FP8.header_dtype}
        for every in (stored, weights)
    )
    differ = sorted(own ^ given)
    rule = "be FP8 where the engine's weights are"
    check(not differ, "weights", rule, f"others for {first_few(differ)}", "make another engine")
