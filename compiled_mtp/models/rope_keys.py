"""Reads the rotary embedding from config.json: `rope_parameters`, or the older `rope_scaling` and
`rope_theta`."""

from __future__ import annotations

import math
from typing import Any

from compiled_mtp.errors import check
from compiled_mtp.model_config import RopeScaling
from compiled_mtp.models.config_keys import FIX, Keys

_SECTIONS = ("rope_parameters", "rope_scaling")
_KINDS = ("default", "linear", "yarn")
_ORIGINAL = "original_max_position_embeddings"
# Keys that older checkpoints have beside the section.
_OUTSIDE = ("rope_theta", "partial_rotary_factor", _ORIGINAL)
# As the paper sets them, for models without values of their own.
_BETA_FAST, _BETA_SLOW = 32.0, 1.0


def rope_fields(keys: Keys, head_dim: int) -> dict[str, Any]:
    """The fields rotary_dim, rope_theta, rope_scaling and max_position_embeddings, from the text section.

    M-RoPE sections do not matter: in text all axes have equal positions. A text may be as long as
    max_position_embeddings says, or as the scaling stretches the original length, if that is more: users add
    a scaling to config.json and leave max_position_embeddings as it is. Raises ValueError for an embedding of
    another kind than linear or YaRN, for one per type of layer, and for a scaling that is given twice.
    """
    sections = {name: keys.section(name) for name in _SECTIONS}
    kinds = {name: _kind(name, section) for name, section in sections.items() if section}
    is_clear = len(kinds) < 2 or set(kinds.values()) == {"default"}
    remedy = "keep one of the two, with rope_theta in it"
    check(is_clear, "rope_scaling", "be absent beside rope_parameters", kinds.get("rope_scaling"), remedy)
    outside = {name: keys.values[name] for name in _OUTSIDE if name in keys.values}
    # As in transformers, the original length outside the section has precedence.
    original = {name: outside[name] for name in (_ORIGINAL,) if name in outside}
    rope = Keys(outside | sections["rope_scaling"] | sections["rope_parameters"] | original)
    share = rope.number("partial_rotary_factor", 0.25)
    rotary_dim = int(head_dim * share) if share <= 1 else 0
    is_even_part = rotary_dim % 2 == 0 and rotary_dim > 0
    check(is_even_part, "partial_rotary_factor", f"give an even part of head_dim {head_dim}", share, FIX)
    length = keys.integer("max_position_embeddings")
    scaling = _scaling(next(iter(kinds.values()), "default"), rope, length)
    if scaling is not None and _ORIGINAL in rope.values:
        length = max(length, int(scaling.factor * scaling.original_length))
    return {
        "rotary_dim": rotary_dim,
        "rope_theta": rope.number("rope_theta"),
        "rope_scaling": scaling,
        "max_position_embeddings": length,
    }


def check_no_rope(top: Keys) -> None:
    """Raise ValueError for rope scaling at the top level of a config.json whose text has its own section."""
    for name in _SECTIONS:
        kind = _kind(name, top.section(name))
        check(kind == "default", name, "be in text_config", f"{kind} outside it", "move it there")


def _scaling(kind: str, rope: Keys, length: int) -> RopeScaling | None:
    """The scaling of that kind; length: max_position_embeddings."""
    if kind == "default":
        return None
    original = rope.integer(_ORIGINAL, length)
    # Some checkpoints give the two lengths instead of their ratio.
    factor = length / original if rope.values.get("factor") is None else rope.number("factor")
    rule, remedy = "be at least 1", f"give factor, or {_ORIGINAL} below max_position_embeddings"
    check(factor >= 1, "factor", rule, factor, remedy)
    if kind == "linear":
        return RopeScaling("linear", factor, original)
    return RopeScaling("yarn", factor, original, **_yarn_fields(rope, factor))


def _yarn_fields(rope: Keys, factor: float) -> dict[str, Any]:
    fast, slow = (_number_or(rope, *pair) for pair in (("beta_fast", _BETA_FAST), ("beta_slow", _BETA_SLOW)))
    check(fast >= slow, "beta_fast", f"be at least beta_slow ({slow:g})", f"{fast:g}", FIX)
    theta = rope.number("rope_theta")
    check(theta > 1, "rope_theta", "be above 1 with rope_type yarn", theta, FIX)
    return {
        "attention_factor": _attention_factor(rope, factor),
        "beta_fast": fast,
        "beta_slow": slow,
        "truncate": rope.flag("truncate", True),
    }


def _attention_factor(rope: Keys, factor: float) -> float:
    if rope.values.get("attention_factor") is not None:
        return rope.number("attention_factor")
    mscale, all_dim = (_number_or(rope, name, 0.0) for name in ("mscale", "mscale_all_dim"))
    if mscale and all_dim:
        return _magnitude(factor, mscale) / _magnitude(factor, all_dim)
    return _magnitude(factor, 1.0)


def _magnitude(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _number_or(rope: Keys, name: str, default: float) -> float:
    """The number under `name`; the default for an absent one, null and 0, as in transformers."""
    return rope.number(name) if rope.values.get(name) else default


def _kind(name: str, section: dict[str, Any]) -> str:
    """The rope type of a section, "default" for one without a type."""
    nested = sorted(key for key, value in section.items() if isinstance(value, dict))
    remedy = "other rotary embeddings for each type of layer are not supported"
    check(not nested, name, "be one for all layers", nested, remedy)
    kind = section.get("rope_type", section.get("type", "default"))
    remedy = "other rope scalings are not supported"
    check(kind in _KINDS, "rope_type", "be default, linear or yarn", kind, remedy)
    return str(kind)
