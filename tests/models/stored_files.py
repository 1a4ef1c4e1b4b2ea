"""Changes to the files of test checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from compiled_mtp.model_config import ModelConfig
from compiled_mtp.models.family import FAMILIES as MODEL_FAMILIES
from compiled_mtp.models.layout import Stored
from compiled_mtp.models.weight_format import NO_FORMATS


def layout_of(config: ModelConfig, names: tuple[str, ...] = ()) -> dict[str, Stored]:
    """Return the layout of a checkpoint with these names."""
    return MODEL_FAMILIES[config.family].layout(config, names, NO_FORMATS)


def rewrite(directory: Path, change: dict[str, torch.Tensor | None]) -> None:
    """Replace, add or (None) drop tensors of model.safetensors, by their full names."""
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in change.items():
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, directory / "model.safetensors")


def file_of(header: Any, rest: bytes = b"", length: int | None = None) -> bytes:
    """Return the bytes of a safetensors file; length: the header length that it states."""
    content = json.dumps(header).encode()
    return (len(content) if length is None else length).to_bytes(8, "little") + content + rest
