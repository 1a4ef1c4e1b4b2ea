"""Reads a checkpoint folder's JSON files into a ModelConfig. Source: the configuration classes of Hugging
Face transformers 5."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compiled_mtp.errors import check, fail, shown
from compiled_mtp.gguf.config import generation_config, hf_config
from compiled_mtp.gguf.container import list_models, read_container
from compiled_mtp.model_config import GENERATION_FIELDS, ModelConfig
from compiled_mtp.models.config_keys import FIX, Keys, read_json
from compiled_mtp.models.family import MODEL_TYPES
from compiled_mtp.models.stored import as_stored
from compiled_mtp.models.vision_fields import read_vision


def read_model_config(path: str | Path, *, max_pixels: int = 0) -> ModelConfig:
    """Read the ModelConfig of a checkpoint folder or a GGUF file.

    max_pixels: the most pixels of an image, for a config with its vision tower; 0 leaves that out.

    A folder's config comes from config.json, generation_config.json and the tokenizer's eos, corrected by the
    stored tensors (`as_stored`); a GGUF file's comes from its metadata. Raises ValueError for a directory
    that is no such checkpoint, and, by name, for every feature that the engine does not support.
    """
    root = Path(path)
    if root.suffix == ".gguf":
        rule, remedy = (
            "be 0 for a GGUF file, of which no vision tower is read",
            "leave max_images and images out",
        )
        check(not max_pixels, "max_images", rule, f"images for {root}", remedy)
        return _read_gguf(root)
    is_there = (root / "config.json").is_file()
    check(is_there, "model", "be a directory with a config.json", root, "" if is_there else _remedy(root))
    top = read_json(root / "config.json")
    name = top.get("model_type")
    remedy = "other architectures are not supported"
    is_known = isinstance(name, str) and name in MODEL_TYPES
    check(is_known, "model_type", f"be one of {', '.join(MODEL_TYPES)}", name, remedy)
    family = MODEL_TYPES[top["model_type"]]
    text = Keys(top).section("text_config") or top
    inner = str(text.get("model_type", name))
    belongs = MODEL_TYPES.get(inner) is family
    check(belongs, "text_config.model_type", f"belong to {family.name}", inner, FIX)
    generation = read_json(root / "generation_config.json", optional=True)
    fields = family.read(Keys(text), top) | _sampling_fields(root, top, text, generation)
    if max_pixels:
        fields["vision"] = read_vision(root, top, text, fields["rotary_dim"], max_pixels)
    return as_stored(ModelConfig(family=family.name, **fields), root)


def _remedy(root: Path) -> str:
    """What to pass in place of a path that is no checkpoint."""
    if (root / "adapter_config.json").is_file():
        return "this is an adapter: pass its base model, and this directory as lora"
    if names := list_models(root):
        return f"pass one of its GGUF files: {shown(', '.join(names))}"
    if root.suffix == ".safetensors":
        return "pass the directory of this file"
    if root.is_file():
        return "the name of a GGUF file must end in .gguf, and a download must be complete"
    if ":" in str(root):  # An address, or llama.cpp's and Ollama's names with a quantisation.
        return "name a repository of the Hub as ORG/NAME, and a GGUF file in it as ORG/NAME/FILE.gguf"
    advice = "pass a Hugging Face checkpoint directory, or a repository of the Hub such as Qwen/Qwen3.5-4B"
    return advice if root.exists() else f"there is no such path, {advice}"


def _read_gguf(path: Path) -> ModelConfig:
    """The ModelConfig of a GGUF file, from its metadata."""
    container = read_container(path)
    text = hf_config(container)
    family = MODEL_TYPES[text["model_type"]]
    fields = family.read(Keys(text), text)
    return ModelConfig(
        family=family.name, **fields, **_sampling_fields(path, {}, text, generation_config(container))
    )


def _sampling_fields(
    root: Path, top: dict[str, Any], text: dict[str, Any], generation: dict[str, Any]
) -> dict[str, Any]:
    """The default sampling parameters, and all eos ids: a turn and a text end with different ids."""
    remedy = "fix the checkpoint's JSON files"
    eos: set[int] = set()
    for section in (top, text, generation):
        ids = section.get("eos_token_id")
        ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
        are_ids = all(type(i) is int for i in ids)
        check(are_ids, "eos_token_id", "be an integer or a list of integers", ids, remedy)
        eos.update(ids)
    eos.update(_tokenizer_eos(root))
    wrong = sorted(i for i in eos if not 0 <= i < text["vocab_size"])
    check(not wrong, "eos_token_id", f"be ids below vocab_size ({text['vocab_size']})", wrong, remedy)
    defaults = {key: generation[key] for key in GENERATION_FIELDS if generation.get(key) is not None}
    for key, value in defaults.items():
        check(type(value) in (int, float), key, "be a number", repr(value), "fix generation_config.json")
    if generation.get("do_sample") is False:
        defaults["temperature"] = 0.0
    return {"eos_token_ids": tuple(sorted(eos)), "generation_defaults": defaults}


def _tokenizer_eos(root: Path) -> list[int]:
    """The id of the eos token that the tokenizer's files name, in a list; empty if they name none."""
    token: Any = None
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        token = token or read_json(root / file, optional=True).get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    if token is None or not (root / "tokenizer.json").is_file():
        return []
    tokenizer = read_json(root / "tokenizer.json")
    try:
        ids = {t["content"]: t["id"] for t in tokenizer.get("added_tokens", [])}
        found = ids.get(token, tokenizer.get("model", {}).get("vocab", {}).get(token))
    except (AttributeError, KeyError, TypeError):
        found = None
    if type(found) is not int:
        raise fail("eos_token", "be a token of tokenizer.json", repr(token), "fix the tokenizer's files")
    return [found]
