"""LoRA adapters as PEFT saves them, merged into a checkpoint's weights while these are loaded.

A merged weight is W + scale * B A, computed from A and B in float64 whenever a part of it is read. Source:
`LoraLayer` and `LoraConfig` of Hugging Face peft 0.21.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from compiled_mtp.errors import check, fail, quote
from compiled_mtp.model_config import ModelConfig
from compiled_mtp.models.catalogue import read_stored
from compiled_mtp.models.config_keys import Keys, read_json
from compiled_mtp.models.finite import find_not_finite
from compiled_mtp.models.headers import Header, read_file, without_prefix
from compiled_mtp.models.stored import HEAD
from compiled_mtp.models.stored_weight import Region, StoredWeight

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PAIR = re.compile(r"^base_model\.model\.(?P<module>.+)\.lora_(?P<part>[AB])\.weight$")
_FLOATS = ("BF16", "F16", "F32")
# Keys of adapter_config.json that this module reads, and keys that only training or bookkeeping reads.
_READ = ("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights")
_IGNORED = (
    *("auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode", "peft_version"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "velora_config", "runtime_config"),
    *("megatron_config", "megatron_core", "qalora_group_size"),
)
_MERGE = "merge it (PEFT: merge_and_unload, then save_pretrained) and pass that as the model"
_FIX = f"fix {CONFIG}"
_SAVE_AGAIN = "save the adapter again"
# Initialisations that leave the base model's weights as they are.
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
# Rows of B that are multiplied at a time. Tiles begin at absolute rows and have all columns, so that a value
# does not depend on the rank that reads it.
_TILE = 256


@dataclass(frozen=True)
class Pair:
    """The matrices A [r, K] and B [N, r] of one linear; scale * B A is added to its weight [N, K]."""

    a: Header
    b: Header
    scale: float

    @property
    def rank(self) -> int:
        """r."""
        return self.a.shape[0]


@dataclass(frozen=True)
class MergedWeight:
    """A stored weight [N, K] with a pair added; its values are float32, see `StoredWeight`."""

    base: Header
    pair: Pair

    @property
    def name(self) -> str:
        return self.base.name

    @property
    def file(self) -> Path:
        return self.base.file

    @property
    def dtype(self) -> str:
        return self.base.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    @property
    def num_bytes(self) -> int:
        return self.base.num_bytes

    def read(self, region: Region, device: torch.device | None = None) -> torch.Tensor:
        """The float32 values in `region`, on `device` or on the CPU."""
        rows, columns = region
        values = self.base.read(region).to(device, torch.float64)
        rank, width = slice(0, self.pair.rank), slice(0, self.shape[1])
        a = self.pair.a.read((rank, width)).to(device, torch.float64)
        for start in range(rows.start // _TILE * _TILE, rows.stop, _TILE):
            tile = slice(start, min(start + _TILE, self.shape[0]))
            added = self.pair.b.read((tile, rank)).to(device, torch.float64) @ a
            first, last = max(start, rows.start), min(tile.stop, rows.stop)
            part = added[first - start : last - start, columns] * self.pair.scale
            values[first - rows.start : last - rows.start] += part
        return values.float()


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter; pairs: by the name of the weight that they change, without the trunk's prefix."""

    path: Path
    pairs: Mapping[str, Pair]

    @property
    def key(self) -> str:
        """A text that differs between adapters of different scales, shapes or files' sizes."""
        parts = [(name, pair.scale, pair.a.shape, pair.b.shape) for name, pair in sorted(self.pairs.items())]
        return repr((parts, (self.path / WEIGHTS).stat().st_size))

    def describe(self) -> str:
        """What the adapter changes, for a log line."""
        ranks = sorted({pair.rank for pair in self.pairs.values()})
        of_head = sum(name.startswith("mtp.") for name in self.pairs)
        head = f"{of_head} of them in the MTP head" if of_head else "the MTP head stays the base model's"
        described = f"rank {', '.join(map(str, ranks))}, merged into {len(self.pairs)} weights, {head}"
        return f"{self.path} of {described}"


def read_merged(config: ModelConfig, root: Path, lora: Path | None) -> dict[str, StoredWeight]:
    """The weights of `read_stored`, with the adapter in the directory `lora` merged into those it changes.

    Raises ValueError as `read_stored` and `read_adapter` do, and for an adapter that changes a weight that
    the checkpoint lacks, that has another shape, that is quantised or that is tied to the embedding.
    """
    weights = read_stored(root)
    if lora is None:
        return weights
    adapter = read_adapter(lora)
    remedy = "use the adapter's own base model"
    missing = [pair.b.name for name, pair in adapter.pairs.items() if name not in weights]
    if config.tie_word_embeddings and HEAD in adapter.pairs:
        tied = "train the adapter without lm_head, or save the merged model with an untied head"
        raise fail("lora", "not change lm_head, which is the embedding", adapter.pairs[HEAD].b.name, tied)
    got = f"{', '.join(missing[:3])} and others" if len(missing) > 3 else ", ".join(missing)
    check(not missing, "lora", "change weights of the checkpoint", got, remedy)
    for name, pair in adapter.pairs.items():
        weights[name] = _merge(weights[name], pair, remedy)
    return weights


def _merge(base: StoredWeight, pair: Pair, remedy: str) -> MergedWeight:
    if not isinstance(base, Header) or base.dtype not in _FLOATS:
        quantised = (
            "use the unquantised base model, or quantise the merged model: `compiled-mtp quantize --lora`"
        )
        raise fail("lora", "change unquantised weights", f"{base.name} in {base.dtype}", quantised)
    shape = (pair.b.shape[0], pair.a.shape[1])
    got = f"{list(shape)} for {base.name} {list(base.shape)}"
    check(base.shape == shape, "lora", "have the weights' shapes", got, remedy)
    return MergedWeight(base, pair)


def read_adapter(path: Path) -> Adapter:
    """Read the adapter that PEFT saved in the directory `path`.

    Raises ValueError, naming the key or the tensor, for a directory without an adapter, for one that is no
    plain LoRA of linears, and for matrices that do not fit each other or are not finite.
    """
    remedy = "pass the directory that PEFT's save_pretrained wrote"
    check((path / CONFIG).is_file(), "lora", f"be a directory with {CONFIG}", path, remedy)
    file = path / WEIGHTS
    check(file.is_file(), "lora", f"hold {WEIGHTS}", path, f"{remedy}, with safe_serialization")
    keys = Keys(read_json(path / CONFIG), _FIX)
    _check_plain(keys.values)
    pairs = dict(_read_pairs(keys, read_file(file)))
    check(bool(pairs), "lora", "change a weight", f"none in {file}", remedy)
    wrong = find_not_finite(
        {
            part.name: part.read(tuple(slice(0, size) for size in part.shape))
            for pair in pairs.values()
            for part in (pair.a, pair.b)
        }
    )
    check(not wrong, "lora", "be finite", f"NaN or infinity in {wrong[0] if wrong else ''}", "train it again")
    return Adapter(path, pairs)


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


def _read_pairs(keys: Keys, headers: list[Header]) -> Iterator[tuple[str, Pair]]:
    """Every weight's name and its pair."""
    parts: dict[str, dict[str, Header]] = {}
    for header in headers:
        found = _PAIR.match(header.name)
        if found is None:
            raise fail("lora", "hold lora_A and lora_B of linears only", header.name, _MERGE)
        is_float, rule = header.dtype in _FLOATS, f"be {' or '.join(_FLOATS)}"
        check(is_float, header.name, rule, header.dtype, _SAVE_AGAIN)
        check(len(header.shape) == 2, header.name, "be a matrix", list(header.shape), _MERGE)
        parts.setdefault(found["module"], {})[found["part"]] = header
    for module, both in parts.items():
        got = f"lora_{min(both)} alone"
        check(len(both) == 2, module, "have lora_A and lora_B", got, _SAVE_AGAIN)
        rank = _value_of(keys, "rank_pattern", "r", module)
        alpha = _value_of(keys, "alpha_pattern", "lora_alpha", module)
        is_stabilised = keys.flag("use_rslora", False)
        pair = Pair(both["A"], both["B"], alpha / (rank**0.5 if is_stabilised else rank))
        got = f"{list(pair.a.shape)} and {list(pair.b.shape)}"
        fits = pair.a.shape[0] == pair.b.shape[1] == rank
        check(fits, module, f"have matrices of rank {rank:g}", got, _FIX)
        yield f"{without_prefix(module)}.weight", pair


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
