"""Reads what a checkpoint folder says of its vision tower and of the preparation of its images."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from compiled_mtp.errors import check, fail
from compiled_mtp.model_config import VisionConfig
from compiled_mtp.models.config_fields import MOST_LAYERS
from compiled_mtp.models.config_keys import FIX, Keys, read_json

_FILES = ("preprocessor_config.json", "processor_config.json")
_OFF = "start without max_images"
# Far above existing towers, so that the products which size a tensor fit 64 bits.
_MOST_PATCH, _MOST_MERGE, _MOST_HIDDEN, _MOST_OTHER = 1024, 64, 1 << 16, 1 << 24
# Keys of vision_config that, if present, must have this value.
_ONLY: tuple[tuple[str, Any, str], ...] = (
    ("hidden_act", "gelu_pytorch_tanh", "other activations are not supported"),
    ("in_channels", 3, "other numbers of channels are not supported"),
    ("deepstack_visual_indexes", [], "deepstack, as in Qwen3-VL, is not supported"),
)
# Keys of preprocessor_config.json, likewise.
_STEPS: tuple[tuple[str, Any], ...] = (
    ("do_resize", True),
    ("do_rescale", True),
    ("do_normalize", True),
    ("do_convert_rgb", True),
)


def read_vision(
    root: Path, top: dict[str, Any], text: dict[str, Any], rotary_dim: int, max_pixels: int
) -> VisionConfig:
    """Return the tower of the checkpoint folder `root`, with images of at most max_pixels pixels.

    top, text: config.json and its text section. rotary_dim: the rotated part of a head of the text model.
    Raises ValueError for a checkpoint without a tower, for missing or bad values, and, by name, for what is
    not supported.
    """
    section = Keys(top).section("vision_config")
    if not section:
        rule = "be 0 for a checkpoint without a vision_config in its config.json"
        remedy = "leave max_images and images out, or take a checkpoint with a vision tower"
        raise fail("max_images", rule, f"images for {root}", remedy)
    keys, ids = Keys(section), Keys(top)
    for key, allowed, why in _ONLY:
        got = section.get(key, allowed)
        check(got == allowed, f"vision_config.{key}", f"be {allowed}", got, f"{why}; {_OFF}")
    patch_size = keys.integer("patch_size", most=_MOST_PATCH)
    merge_size = keys.integer("spatial_merge_size", most=_MOST_MERGE)
    hidden_size, num_heads = keys.integer("hidden_size", most=_MOST_HIDDEN), keys.integer("num_heads")
    fits = hidden_size % num_heads == 0 and hidden_size // num_heads % 4 == 0
    check(fits, "vision_config.hidden_size", "give heads of a multiple of 4", hidden_size, FIX)
    entries = keys.integer("num_position_embeddings", most=_MOST_OTHER)
    side = math.isqrt(entries)
    check(side * side == entries, "num_position_embeddings", "be a square", entries, FIX)
    sections = _mrope_section(Keys(text))
    rule = f"add up to {rotary_dim // 2}, half of the rotated part of a head"
    check(sum(sections) == rotary_dim // 2, "mrope_section", rule, list(sections), FIX)
    return VisionConfig(
        depth=keys.integer("depth", most=MOST_LAYERS),
        hidden_size=hidden_size,
        num_heads=num_heads,
        intermediate_size=keys.integer("intermediate_size", most=_MOST_OTHER),
        out_hidden_size=_out_hidden_size(keys, Keys(text)),
        patch_size=patch_size,
        temporal_patch_size=keys.integer("temporal_patch_size", most=_MOST_MERGE),
        merge_size=merge_size,
        side=side,
        image_token_id=_token_id(ids, "image_token_id", text),
        video_token_id=_token_id(ids, "video_token_id", text),
        mrope_section=sections,
        **_preparation(root, patch_size, merge_size, max_pixels),
    )


def _out_hidden_size(keys: Keys, text: Keys) -> int:
    size, hidden = keys.integer("out_hidden_size"), text.integer("hidden_size")
    check(size == hidden, "out_hidden_size", f"equal the text model's hidden_size ({hidden})", size, FIX)
    return size


def _token_id(top: Keys, name: str, text: dict[str, Any]) -> int:
    return top.integer(name, least=0, most=Keys(text).integer("vocab_size") - 1)


def _mrope_section(text: Keys) -> tuple[int, int, int]:
    rope = text.values | text.section("rope_scaling") | text.section("rope_parameters")
    section = rope.get("mrope_section")
    are_counts = isinstance(section, list) and len(section) == 3 and all(type(n) is int for n in section)
    check(are_counts, "mrope_section", "be a list of three counts", section, FIX)
    assert isinstance(section, list)
    is_ordered = section[0] >= max(section[1:]) and min(section) >= 0
    check(is_ordered, "mrope_section", "give time the most frequencies", section, FIX)
    remedy = f"positions in consecutive sections are not supported; {_OFF}"
    check(rope.get("mrope_interleaved") is True, "mrope_interleaved", "be true", "false", remedy)
    return section[0], section[1], section[2]


def _preparation(root: Path, patch_size: int, merge_size: int, max_pixels: int) -> dict[str, Any]:
    """The fields of VisionConfig that preprocessor_config.json, or the like, gives."""
    file = next((name for name in _FILES if (root / name).is_file()), None)
    if file is None:
        rule = f"be 0 without a {_FILES[0]}, which says how images are prepared"
        raise fail("max_images", rule, f"images for {root}", f"download that file, or {_OFF}")
    values = read_json(root / file)
    keys = Keys(values if file == _FILES[0] else Keys(values).section("image_processor"))
    for key, allowed in _STEPS:
        got = keys.values.get(key, allowed)
        check(got == allowed, key, f"be {allowed}", got, f"other preparations are not supported; {_OFF}")
    for key, own in (("patch_size", patch_size), ("merge_size", merge_size)):
        got = keys.integer(key, own)
        check(got == own, key, f"be {own} in {file}, as in config.json", got, FIX)
    check(keys.number("rescale_factor", 1 / 255) == 1 / 255, "rescale_factor", "be 1/255", "another", FIX)
    size = Keys(keys.section("size"))
    least = size.integer("shortest_edge", keys.values.get("min_pixels"))
    most = size.integer("longest_edge", keys.values.get("max_pixels"))
    check(least <= most, "size", "have shortest_edge, an area, up to longest_edge", f"{least}, {most}", FIX)
    rule = f"be at least {least}, the fewest pixels of an image of this checkpoint"
    check(max_pixels >= least, "max_pixels", rule, max_pixels, "raise it")
    return {
        "least_pixels": least,
        "most_pixels": min(most, max_pixels),
        "mean": _channels(keys, "image_mean"),
        "std": _channels(keys, "image_std"),
    }


def _channels(keys: Keys, name: str) -> tuple[float, float, float]:
    values = keys.values.get(name)
    are_three = isinstance(values, list) and len(values) == 3
    are_three = are_three and all(type(v) in (int, float) and 0 < v <= 1 for v in values or ())
    check(are_three, name, "be three numbers in 0 to 1", values, "fix the file")
    assert isinstance(values, list)
    return float(values[0]), float(values[1]), float(values[2])
