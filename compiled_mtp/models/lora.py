"""LoRA adapters as PEFT saves them, merged into a checkpoint's weights while these are loaded.

Source: `LoraConfig`, `LoraLayer` and `ParamWrapper` of Hugging Face peft 0.21.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from compiled_mtp.errors import check, fail, quote
from compiled_mtp.model_config import ModelConfig
from compiled_mtp.models.catalogue import read_stored
from compiled_mtp.models.config_keys import Keys, read_json
from compiled_mtp.models.finite import find_not_finite
from compiled_mtp.models.headers import Header, read_file, without_prefix
from compiled_mtp.models.lora_weights import (
    Change,
    MergedWeight,
    StackPair,
    change_expert,
    change_linear,
    change_stack,
)
from compiled_mtp.models.stored import HEAD, are_equal
from compiled_mtp.models.stored_weight import StoredWeight

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PAIR = re.compile(r"^base_model\.model\.(?P<module>.+)\.lora_(?P<part>[AB])\.weight$")
# PEFT saves the checkpoint's lm_head beside the pair that changes that weight.
_BASE = re.compile(r"^base_model\.model\.(?P<module>.+)\.base_layer\.weight$")
# The two stacks of experts of a layer: the second wraps the first.
_EXPERTS = re.compile(r"^(?P<module>.+\.mlp\.experts)(\.base_layer)?$")
_FLOATS = ("BF16", "F16", "F32")
# Keys of adapter_config.json that this module reads, and keys that only training or bookkeeping reads.
_READ = ("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights")
_IGNORED = (
    *("auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode", "peft_version"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "velora_config", "runtime_config"),
    *("megatron_config", "megatron_core", "qalora_group_size", "target_parameters"),
)
_MERGE = "merge it (PEFT: merge_and_unload, then save_pretrained) and pass that as the model"
_FIX = f"fix {CONFIG}"
_OTHER_BASE = "use the adapter's own base model"
_SAVE_AGAIN = "save the adapter again"
# Initialisations that leave the base model's weights as they are.
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter: the matrices A and B of each module, by its name in the base model.

    pairs: of linears. stacks: of experts, by the names of their modules, of which a layer may have two.
    bases: copies of the base model's weights, of some modules of `pairs`.
    """

    path: Path
    keys: Keys
    pairs: Mapping[str, Change]
    stacks: Mapping[str, tuple[Header, Header]]
    bases: Mapping[str, Header]

    @property
    def key(self) -> str:
        """A text that differs between adapters of other settings, shapes or files' sizes."""
        return repr((sorted(self.keys.values.items()), (self.path / WEIGHTS).stat().st_size))

    def describe(self) -> str:
        """What the adapter changes, for a log line."""
        names = [without_prefix(module) for module in (*self.pairs, *self.stacks)]
        of_head = sum(name.startswith("mtp.") for name in names)
        head = f"{of_head} of them in the MTP head" if of_head else "the MTP head stays the base model's"
        stacks = f" and {len(self.stacks)} stacks of experts" if self.stacks else ""
        return f"{self.path}, merged into {len(self.pairs)} weights{stacks}, {head}"

    def rank_and_scale(self, module: str) -> tuple[float, float]:
        """The rank of a module, and what B A is multiplied by: alpha / r, or alpha / sqrt(r)."""
        rank = _value_of(self.keys, "rank_pattern", "r", module)
        alpha = _value_of(self.keys, "alpha_pattern", "lora_alpha", module)
        return rank, alpha / (rank**0.5 if self.keys.flag("use_rslora", False) else rank)


def read_merged(config: ModelConfig, root: Path, lora: Path | None) -> dict[str, StoredWeight]:
    """The weights of `read_stored`, with the adapter in the directory `lora` merged into those it changes.

    Raises ValueError as `read_stored` and `read_adapter` do, and for an adapter that changes a weight that
    the checkpoint lacks, that has another shape, that is quantised, that is tied to the embedding, or of
    which the adapter has another copy.
    """
    weights = read_stored(root)
    if lora is None:
        return weights
    adapter = read_adapter(lora)
    changes: dict[str, Change] = {f"{without_prefix(m)}.weight": pair for m, pair in adapter.pairs.items()}
    if config.tie_word_embeddings and HEAD in changes:
        remedy = "train the adapter without lm_head, or save the merged model with an untied head"
        raise fail("lora", "not change lm_head, which is the embedding", changes[HEAD].name, remedy)
    for module in adapter.stacks:
        changes |= _expert_changes(config, adapter, module, weights)
    missing = [change.name for name, change in changes.items() if name not in weights]
    got = f"{', '.join(missing[:3])} and others" if len(missing) > 3 else ", ".join(missing)
    check(not missing, "lora", "change weights of the checkpoint", got, _OTHER_BASE)
    copies = {f"{without_prefix(module)}.weight": copy for module, copy in adapter.bases.items()}
    for name, change in changes.items():
        base = weights[name]
        weights[name] = _merge(base, change)
        is_same = name not in copies or are_equal(copies[name], base)
        remedy = f"{_OTHER_BASE}, or {_MERGE}"
        check(is_same, "lora", "be trained on this model", f"another {base.name}", remedy)
    return weights


def _expert_changes(
    config: ModelConfig, adapter: Adapter, module: str, stored: Mapping[str, StoredWeight]
) -> dict[str, Change]:
    """The changes of a layer's experts, whether the checkpoint stacks them or has a tensor for each."""
    (a, b), found = adapter.stacks[module], _EXPERTS.match(module)
    assert found is not None
    hidden, inner, count = config.hidden_size, config.moe_intermediate_size, config.num_experts
    # The matrices' names do not say which of the two stacks they change; their sizes do.
    sizes = {(hidden, 2 * inner): "gate_up_proj", (inner, hidden): "down_proj"}
    stack = sizes.get((a.shape[1], b.shape[0]), "")
    got = f"{list(a.shape)} and {list(b.shape)} for {module}"
    check(config.is_moe and bool(stack), "lora", "have the weights' shapes", got, _OTHER_BASE)
    rank, scale = adapter.rank_and_scale(f"{found['module']}.{stack}")
    fits = a.shape[0] == b.shape[1] == rank * count
    check(fits, module, f"have matrices of rank {rank:g} for {count} experts", got, _FIX)
    pair = StackPair(a, b, scale, count)
    name = without_prefix(found["module"])
    if f"{name}.{stack}" in stored:
        return {f"{name}.{stack}": change_stack(pair)}
    parts = {"down_proj": 0} if stack == "down_proj" else {"gate_proj": 0, "up_proj": inner}
    rows = hidden if stack == "down_proj" else inner
    return {
        f"{name}.{expert}.{part}.weight": change_expert(pair, expert, first, rows)
        for expert in range(count)
        for part, first in parts.items()
    }


def _merge(base: StoredWeight, change: Change) -> MergedWeight:
    if not isinstance(base, Header) or base.dtype not in _FLOATS:
        remedy = (
            "use the unquantised base model, or quantise the merged model: `compiled-mtp quantize --lora`"
        )
        raise fail(
            "lora", "change unquantised weights of safetensors", f"{base.name} in {base.dtype}", remedy
        )
    got = f"{list(change.shape)} for {base.name} {list(base.shape)}"
    check(base.shape == change.shape, "lora", "have the weights' shapes", got, _OTHER_BASE)
    return MergedWeight(**vars(base), change=change)


def read_adapter(path: Path) -> Adapter:
    """Read the adapter that PEFT saved in the directory `path`.

    Raises ValueError, naming the key or the tensor, for a directory without an adapter, for one that is more
    than pairs for linears and experts, and for matrices that do not fit each other or are not finite.
    """
    remedy = "pass the directory that PEFT's save_pretrained wrote"
    check((path / CONFIG).is_file(), "lora", f"be a directory with {CONFIG}", path, remedy)
    file = path / WEIGHTS
    check(file.is_file(), "lora", f"hold {WEIGHTS}", path, f"{remedy}, with safe_serialization")
    keys = Keys(read_json(path / CONFIG), _FIX)
    _check_plain(keys.values)
    headers = read_file(file)
    bases = _read_bases(headers)
    both = _read_matrices([header for header in headers if header not in bases.values()])
    stacks = {module: pair for module, pair in both.items() if _EXPERTS.match(module)}
    adapter = Adapter(path, keys, {}, stacks, bases)
    pairs = {
        module: _linear_pair(adapter, module, *pair) for module, pair in both.items() if module not in stacks
    }
    check(bool(both), "lora", "change a weight", f"none in {file}", remedy)
    for header in (header for pair in both.values() for header in pair):
        is_finite = not find_not_finite({header.name: header.read_whole()})
        check(is_finite, "lora", "be finite", f"NaN or infinity in {header.name}", "train it again")
    return replace(adapter, pairs=pairs)


def _linear_pair(adapter: Adapter, module: str, a: Header, b: Header) -> Change:
    rank, scale = adapter.rank_and_scale(module)
    got = f"{list(a.shape)} and {list(b.shape)}"
    check(a.shape[0] == b.shape[1] == rank, module, f"have matrices of rank {rank:g}", got, _FIX)
    return change_linear(a, b, scale)


def _check_plain(values: Mapping[str, Any]) -> None:
    """Raise ValueError for a key of adapter_config.json that asks for more than W + scale * B A."""
    kind = values.get("peft_type")
    check(kind == "LORA", "peft_type", "be LORA", kind, _MERGE)
    start = values.get("init_lora_weights", True)
    check(start in _PLAIN_STARTS, "init_lora_weights", "leave the base model as it is", start, _MERGE)
    for key, value in values.items():
        is_off = not value or (key == "bias" and value == "none")
        if key not in (*_READ, *_IGNORED) and not is_off:
            raise fail(f"{key} of {CONFIG}", "be off", quote(value), _MERGE)


def _read_bases(headers: list[Header]) -> dict[str, Header]:
    """The copies of weights that the adapter changes, by module."""
    changed = {found["module"] for header in headers if (found := _PAIR.match(header.name))}
    copies = {found["module"]: header for header in headers if (found := _BASE.match(header.name))}
    return {module: header for module, header in copies.items() if module in changed}


def _read_matrices(headers: list[Header]) -> dict[str, tuple[Header, Header]]:
    """A and B of every module."""
    parts: dict[str, dict[str, Header]] = {}
    for header in headers:
        found = _PAIR.match(header.name)
        if found is None:
            raise fail("lora", "hold lora_A and lora_B of linears and experts only", header.name, _MERGE)
        is_float, rule = header.dtype in _FLOATS, f"be {' or '.join(_FLOATS)}"
        check(is_float, header.name, rule, header.dtype, _SAVE_AGAIN)
        check(len(header.shape) == 2, header.name, "be a matrix", list(header.shape), _MERGE)
        parts.setdefault(found["module"], {})[found["part"]] = header
    for module, both in parts.items():
        got = f"lora_{min(both)} alone"
        check(len(both) == 2, module, "have lora_A and lora_B", got, _SAVE_AGAIN)
    return {module: (both["A"], both["B"]) for module, both in parts.items()}


def _value_of(keys: Keys, patterns: str, default: str, module: str) -> float:
    """The number under `default`, or under the first of the regular expressions `patterns` that fits."""
    values = keys.section(patterns)
    for pattern in values:
        try:
            is_match = re.match(rf"(.*\.)?({pattern})$", module)
        except re.error as error:
            got = f"{pattern} ({error})"
            raise fail(patterns, "hold regular expressions", got, _FIX) from None
        if is_match:
            return Keys(values, _FIX).number(pattern)
    return keys.number(default)
