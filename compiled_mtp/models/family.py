"""Model families: one record holds all that the engine knows of a family.

To add a family, write its record here: a function that reads its config.json (built from those in
config_fields.py), its tensor layout (layout.py), and, if its layers differ, modules of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

from compiled_mtp.model_config import ModelConfig
from compiled_mtp.models.config_fields import dense_ffn, moe_ffn, text_fields
from compiled_mtp.models.config_keys import Keys
from compiled_mtp.models.layout import Stored, checkpoint_layout
from compiled_mtp.models.mtp import DraftModel
from compiled_mtp.models.qwen3_5 import TargetModel
from compiled_mtp.models.weight_format import Formats


@dataclass(frozen=True)
class Family:
    """A model family.

    model_types: its names in config.json, at the top level or in the text section. read(text section, top
    level) returns the fields of ModelConfig except `family` and the sampling defaults; it raises ValueError
    for features that the engine does not support. layout(config, stored names, formats) returns the layout of
    its tensors, see `checkpoint_layout`. target and draft are called with (config, dtype, device, formats,
    communicator).
    """

    name: str
    model_types: tuple[str, ...]
    read: Callable[[Keys, dict[str, Any]], dict[str, Any]]
    layout: Callable[[ModelConfig, Collection[str], Formats], dict[str, Stored]] = checkpoint_layout
    target: type[TargetModel] = TargetModel
    draft: type[DraftModel] = DraftModel


def _read_dense(text: Keys, top: dict[str, Any]) -> dict[str, Any]:
    return text_fields(text, top) | dense_ffn(text)


def _read_moe(text: Keys, top: dict[str, Any]) -> dict[str, Any]:
    # Qwen3.5-MoE's config.json has no norm_topk_prob: it always renormalises.
    return text_fields(text, top) | moe_ffn(text)


def _read_next(text: Keys, top: dict[str, Any]) -> dict[str, Any]:
    if text.integer("num_experts", least=0) == 0:
        return text_fields(text, top) | dense_ffn(text)
    return text_fields(text, top) | moe_ffn(text, norm_topk_prob=text.flag("norm_topk_prob", True))


FAMILIES = {
    family.name: family
    for family in (
        Family("qwen3_next", ("qwen3_next",), _read_next, partial(checkpoint_layout, is_interleaved=True)),
        Family("qwen3_5", ("qwen3_5", "qwen3_5_text"), _read_dense),
        Family("qwen3_5_moe", ("qwen3_5_moe", "qwen3_5_moe_text"), _read_moe),
    )
}
MODEL_TYPES = {name: family for family in FAMILIES.values() for name in family.model_types}
