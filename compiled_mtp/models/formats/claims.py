"""Reads what config.json and hf_quant_config.json say about quantised weights.

The stored tensors decide what is quantised, and how. These files are read for what names and shapes do not
tell (group sizes, GPTQ's zero points), and to refuse unsupported methods by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compiled_mtp.errors import check, shown
from compiled_mtp.models.config_keys import FIX, Keys, read_json

SECTION = "quantization_config"
_REMEDY = "use the bf16 or the FP8 release of the model, or one in a supported format (docs/checkpoints.md)"
METHODS = ("fp8", "gptq", "auto-round", "awq", "compressed-tensors", "modelopt")
# The packings of AutoRound, with the number that is added to a stored zero point of GPTQ's tensors; None for
# other tensors.
_PACKINGS = {
    "auto_round:auto_gptq": 1,
    "auto_round:auto_awq": None,
    "auto_round": 0,
    "auto_round:gptqmodel": 0,
    "auto_round:llm_compressor": None,
    "auto_round:fp8": None,
    "auto_round:fp8_static": None,
}
_DATA_TYPES = ("int", "fp", "mx_fp", "mx_fp_rceil", "nv_fp", "nv_fp4_with_static_gs")
# Rotations of activations, by the keys of compressed-tensors and AutoRound.
_ROTATIONS = ("transform_config", "rotation_config", "spinquant_config")
_TENSORS_FORMATS = (
    *("pack-quantized", "float-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized"),
    *("mxfp8-quantized", "naive-quantized", "mixed-precision", "int-quantized", "dense"),
)
# modelopt writes some of them in lower case.
_ALGORITHMS = (
    *("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "FP8_BLOCK_SCALES", "NVFP4", "W4A16_NVFP4"),
    *("MXFP8", "MIXED_PRECISION"),
)
_BITS = (4, 8)


@dataclass(frozen=True)
class Claims:
    """What the files say about quantised weights.

    is_fp8: weights are FP8 in blocks of 128. group_sizes: of integer weights, -1 for one group per row; empty
    if not given. zero_offset: the number that GPTQ adds to a stored zero point, None if not given.
    is_symmetric: whether all GPTQ weights are symmetric, None if not given. is_reordered: columns of integer
    weights may be in another order than their groups.
    """

    is_fp8: bool = False
    group_sizes: tuple[int, ...] = ()
    zero_offset: int | None = None
    is_symmetric: bool | None = None
    is_reordered: bool = False


def read_claims(root: Path) -> Claims:
    """Read the claims of the files in `root`. Raises ValueError for an unsupported method or packing."""
    top = read_json(root / "config.json", optional=True)
    other = read_json(root / "hf_quant_config.json", optional=True)
    if other:
        _check_algorithms(Keys(other).section("quantization"), "hf_quant_config.json: quant_algo")
    text = Keys(top).section("text_config")
    sections = [section for keys in (top, text) if (section := Keys(keys).section(SECTION))]
    return claims_of(sections[0]) if sections else Claims()


def claims_of(section: dict[str, Any]) -> Claims:
    """Read the claims of a quantization_config. Raises ValueError for an unsupported method or packing."""
    # modelopt's older versions name the producer alone.
    producer = Keys(section).section("producer").get("name")
    method = section.get("quant_method", "modelopt" if producer == "modelopt" else None)
    got = "none, as MLX writes it" if method is None and "group_size" in section else method
    check(method in METHODS, "quantization_config.quant_method", f"be {' or '.join(METHODS)}", got, _REMEDY)
    for key in _ROTATIONS:
        _check_key(section, key, (None, {}))
    match method:
        case "fp8":
            return _fp8(section)
        case "gptq":
            return _gptq(section)
        case "auto-round":
            return _auto_round(section)
        case "awq":
            return _awq(section)
        case "compressed-tensors":
            return _compressed_tensors(section)
    _check_algorithms(section, f"{SECTION}.quant_algo")
    return Claims()


def _fp8(section: dict[str, Any]) -> Claims:
    # A missing block size means one scale per tensor, which is another format.
    layout = {"fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": None} | section
    for key, wanted in (("fmt", "e4m3"), ("activation_scheme", "dynamic"), ("weight_block_size", [128, 128])):
        _check_key(layout, key, (wanted,))
    return Claims(is_fp8=True)


def _gptq(section: dict[str, Any]) -> Claims:
    # `dynamic` overrides these keys for names that match a pattern.
    parts = [section, *_sections(section.get("dynamic"))]
    _check_bits(parts, "bits")
    _check_key(section, "checkpoint_format", (None, "gptq", "gptq_v2"))
    offsets = {None: None, "gptq": 1, "gptq_v2": 0}
    return Claims(
        group_sizes=_group_sizes(parts),
        zero_offset=offsets[section.get("checkpoint_format")],
        is_symmetric=_agreed(parts, "sym"),
        is_reordered=any(part.get("desc_act") is True for part in parts),
    )


def _auto_round(section: dict[str, Any]) -> Claims:
    # `extra_config` overrides these keys for some names; entries of 16 bits are not quantised.
    parts = [section, *_sections(section.get("extra_config"))]
    parts = [part for part in parts if not (type(bits := part.get("bits")) is int and bits >= 16)]
    _check_bits(parts, "bits")
    packing = section.get("packing_format")
    _check_key(section, "packing_format", (None, *_PACKINGS))
    for part in parts:
        _check_key(part, "data_type", (None, *_DATA_TYPES))
    if section.get("data_type", "int") != "int":
        return Claims()
    return Claims(
        group_sizes=_group_sizes(parts),
        zero_offset=None if packing is None else _PACKINGS[packing],
        is_symmetric=_agreed(parts, "sym"),
    )


def _awq(section: dict[str, Any]) -> Claims:
    version = section.get("version", "gemm")
    is_gemm = isinstance(version, str) and version.lower() == "gemm"
    remedy = "other packings (gemv, gemv_fast, marlin) are not supported"
    check(is_gemm, f"{SECTION}.version", "be gemm", version, remedy)
    _check_key(section, "bits", (None, 4))
    return Claims(group_sizes=_group_sizes([section]))


def _compressed_tensors(section: dict[str, Any]) -> Claims:
    groups = list(_sections(section.get("config_groups")))
    for each in (section, *groups):
        _check_key(each, "format", (None, *_TENSORS_FORMATS))
    # "frozen" are plain weights, of a checkpoint with scales of keys and values.
    _check_key(section, "quantization_status", (None, "compressed", "frozen"))
    # Unsupported: sparse weights that omit zeros. Older versions describe dense ones too.
    if Keys(section).section("sparsity_config").get("format") != "dense":
        _check_key(section, "sparsity_config", (None, {}))
    weights = [Keys(group).section("weights") for group in groups]
    _check_bits(weights, "num_bits")
    integers = [part for part in weights if part.get("type", "int") == "int"]
    for part in integers:
        _check_key(part, "strategy", (None, "group", "channel", "tensor"))
    rows = ("channel", "tensor")
    whole = [{"group_size": -1} for part in integers if part.get("strategy") in rows]
    grouped = [part for part in integers if part.get("strategy") not in rows]
    # "weight", or "static", quantises columns by importance and stores them in order.
    is_reordered = any(part.get("actorder") in ("group", "dynamic", True) for part in integers)
    return Claims(group_sizes=_group_sizes([*whole, *grouped]), is_reordered=is_reordered)


def _check_algorithms(section: dict[str, Any], name: str) -> None:
    """Raise ValueError for an unsupported modelopt algorithm (quant_algo) of all layers or of one."""
    found = [section, *_sections(section.get("quantized_layers"))]
    for algorithm in (part["quant_algo"] for part in found if part.get("quant_algo") is not None):
        known = isinstance(algorithm, str) and algorithm.upper() in _ALGORITHMS
        check(known, name, f"be {' or '.join(_ALGORITHMS)}", algorithm, _REMEDY)


def _sections(value: object) -> Iterator[dict[str, Any]]:
    """The objects among the values of an object."""
    if isinstance(value, dict):
        yield from (inner for inner in value.values() if isinstance(inner, dict))


def _check_key(section: dict[str, Any], key: str, allowed: tuple[Any, ...]) -> None:
    """Raise ValueError for a value that is not in `allowed`, where None stands for a missing key."""
    got = section.get(key)
    texts = [json.dumps(one) for one in allowed if one is not None] or ["left out"]
    check(got in allowed, f"{SECTION}.{key}", f"be {' or '.join(texts)}", json.dumps(got), _REMEDY)


def _check_bits(parts: Iterable[dict[str, Any]], key: str) -> None:
    for bits in (part[key] for part in parts if part.get(key) is not None):
        rule = f"be {' or '.join(map(str, _BITS))}"
        check(type(bits) is int and bits in _BITS, f"{SECTION}.{key}", rule, shown(bits, repr), _REMEDY)


def _group_sizes(parts: Iterable[dict[str, Any]]) -> tuple[int, ...]:
    """The group sizes that `parts` name, ascending."""
    sizes: set[int] = set()
    for part in parts:
        size = part.get("group_size")
        if size is None:
            continue
        is_size = type(size) is int and (size == -1 or size > 0)
        check(is_size, f"{SECTION}.group_size", "be -1 or a positive integer", shown(size, repr), FIX)
        sizes.add(size)
    return tuple(sorted(sizes))


def _agreed(parts: Iterable[dict[str, Any]], key: str) -> bool | None:
    """The value on which all of `parts` with the key agree; None if they differ or none has the key."""
    found = {Keys(part).flag(key, False) for part in parts if part.get(key) is not None}
    return found.pop() if len(found) == 1 else None
