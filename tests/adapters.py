"""Random LoRA adapters in PEFT's format, and the weights that they make by the formula."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.checkpoints import read_stored

RANK, ALPHA = 4, 8
# Linears of every kind of layer and their names in all families.
LINEARS = re.compile(
    r"layers\.\d+\.(self_attn\.[qkvo]_proj|linear_attn\.(in_proj_\w+|out_proj)"
    r"|mlp\.(shared_expert\.)?(gate|up|down)_proj)\.weight$"
)


def write_adapter(
    directory: Path,
    base: Path,
    *,
    targets: re.Pattern[str] = LINEARS,
    ranks: Mapping[str, int] | None = None,
    dtype: torch.dtype = torch.float32,
    config: Mapping[str, Any] | None = None,
    tensors: Mapping[str, torch.Tensor] | None = None,
) -> Path:
    """Write an adapter of the trunk's linears `targets` of the checkpoint in `base`; return the directory.

    ranks: by the end of a module's name, RANK for the others. config, tensors: added to the files.
    """
    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(9)
    pairs: dict[str, torch.Tensor] = {}
    for name, weight in read_stored(base).items():
        if not targets.search(name) or name.startswith("mtp."):
            continue
        module = name.removesuffix(".weight")
        rank = next((r for end, r in (ranks or {}).items() if module.endswith(end)), RANK)
        rows, columns = weight.shape
        a = torch.randn(rank, columns, generator=generator) / columns**0.5
        b = torch.randn(rows, rank, generator=generator) * 0.3
        pairs[f"base_model.model.{module}.lora_A.weight"] = a.to(dtype)
        pairs[f"base_model.model.{module}.lora_B.weight"] = b.to(dtype)
    save_file(pairs | dict(tensors or {}), directory / "adapter_model.safetensors")
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "base",
        "r": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.1,
        "bias": "none",
        "target_modules": targets.pattern,
        "init_lora_weights": True,
        "use_rslora": False,
        "modules_to_save": None,
        "rank_pattern": dict(ranks or {}),
        "alpha_pattern": {},
    }
    (directory / "adapter_config.json").write_text(json.dumps(content | dict(config or {})))
    return directory


def merge_by_formula(base: Path, pairs: Mapping[str, torch.Tensor], scale_of: Any) -> dict[str, torch.Tensor]:
    """Return the checkpoint's tensors, W + scale * B A in float64 for those that `pairs` change.

    scale_of(module) returns the scale of a module, by its name in the checkpoint.
    """
    merged = dict(read_stored(base))
    for name, a in pairs.items():
        if name.endswith(".lora_A.weight"):
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            b = pairs[name.replace("lora_A", "lora_B")]
            added = b.double() @ a.double() * scale_of(module)
            merged[f"{module}.weight"] = merged[f"{module}.weight"].double() + added
    return merged
