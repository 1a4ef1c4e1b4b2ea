"""The key of a graph cache: what compiled code depends on, as the configs' and the spec's fields declare."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from compiled_mtp.config import EngineConfig
from compiled_mtp.graphs.artifacts import machine_key, source_digest
from compiled_mtp.graphs.buckets import Bucket
from compiled_mtp.graphs.compile import GraphMode
from compiled_mtp.model_config import NOT_TRACED
from compiled_mtp.runner.memory_plan import MemoryPlan
from compiled_mtp.runner.spec import EngineSpec

_IMPORTED = re.compile(r"^ *(?:from|import) compiled_mtp\.(\w+)", re.MULTILINE)


def early_key(spec: EngineSpec) -> dict[str, Any]:
    """The part of a graph_cache's key that is known before the weights are loaded; `late_key` is the rest.

    The value that `spec` resolved replaces the setting that the config names. Call it after `apply`, which
    sets the threads. The fields are in the order in which `check_key` compares them.
    """
    return {
        **{f"model.{name}": value for name, value in traced(spec.model).items()},
        **traced_settings(spec.config),
        **machine_key(spec.device),
        **traced(spec),
        "source": source_digest(traced_paths()),
        "num_threads": torch.get_num_threads() if spec.device.type == "cpu" else 0,
    }


def late_key(
    spec: EngineSpec, buckets: Iterable[Bucket], memory: MemoryPlan, graph_mode: GraphMode | None
) -> dict[str, Any]:
    """The part of the key that follows from the weights: batches, wide rounds, blocks, graph mode."""
    sizes = [bucket.groups for bucket in buckets]
    key: dict[str, Any] = {"max_batch": memory.max_batch, "batch_sizes": sizes}
    key |= {"num_blocks": memory.num_blocks, "wide_shapes": spec.wide_shapes}
    return key | ({"graph_mode": graph_mode} if spec.device.type == "cuda" else {})


def traced(record: Any) -> dict[str, Any]:
    """The fields of a dataclass that are part of the key, as JSON values: all that are not marked NOT_TRACED.

    In a field's metadata "traced" is a function that makes the JSON value, and "setting" names the setting
    that the field replaces in the key.
    """
    found = {}
    for field in fields(record):
        write = field.metadata.get("traced", lambda value: value)
        if write is not None:
            found[field.metadata.get("setting", field.name)] = write(getattr(record, field.name))
    return found


def traced_settings(config: EngineConfig) -> Mapping[str, Any]:
    """The settings that are part of the key, as the caller gave them: all that are not marked NOT_TRACED."""
    untraced = {n for n, info in type(config).model_fields.items() if info.json_schema_extra == NOT_TRACED}
    return config.model_dump(mode="json", exclude=untraced)


def traced_paths() -> list[Path]:
    """The folders and modules of this package from which saved programs are traced: all that the programs'
    modules import, directly or not."""
    package = Path(__file__).parents[1]
    runner = package / "runner"
    roots = {runner / name for name in ("programs.py", "program_maker.py", "static_inputs.py")}
    found, waiting = set[Path](), set(roots)
    while waiting:
        path = waiting.pop()
        found.add(path)
        for file in path.rglob("*.py") if path.is_dir() else (path,):
            rooms = [package / name for name in _IMPORTED.findall(file.read_text(encoding="utf-8"))]
            waiting |= {room if room.is_dir() else room.with_suffix(".py") for room in rooms}
        # The runner's other modules decide what is launched; none of their code is traced.
        waiting -= found | {runner}
    return sorted(found)
