"""The key of a graph cache: what compiled code depends on, as the fields of configs and spec declare it."""

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
from compiled_mtp.runner.spec import EngineSpec

_IMPORTED = re.compile(r"^ *(?:from|import) compiled_mtp\.(\w+)", re.MULTILINE)


def early_key(spec: EngineSpec) -> dict[str, Any]:
    """What a graph_cache must have been made for, except `late_key`: what `spec` makes of a setting stands in
    the place of the setting. To be called once `apply` has set the threads."""
    return {
        **{f"model.{name}": value for name, value in traced(spec.model).items()},
        **traced_settings(spec.config),
        **machine_key(spec.device),
        **traced(spec),
        "source": source_digest(traced_paths()),
        "num_threads": torch.get_num_threads() if spec.device.type == "cpu" else 0,
    }


def late_key(
    spec: EngineSpec, buckets: Iterable[Bucket], num_blocks: int, graph_mode: GraphMode | None
) -> dict[str, Any]:
    """What follows from the weights: the row unit's shapes, the blocks beside them, the graph mode."""
    sizes = [bucket.groups for bucket in buckets]
    key: dict[str, Any] = {"batch_sizes": sizes, "num_blocks": num_blocks}
    return key | ({"graph_mode": graph_mode} if spec.device.type == "cuda" else {})


def traced(record: Any) -> dict[str, Any]:
    """The fields of a dataclass that are part of the key: all that are not marked NOT_TRACED.

    "traced" in a field's metadata makes a JSON value of its own; "setting" names the setting whose place it
    takes.
    """
    found = {}
    for field in fields(record):
        write = field.metadata.get("traced", lambda value: value)
        if write is not None:
            found[field.metadata.get("setting", field.name)] = write(getattr(record, field.name))
    return found


def traced_settings(config: EngineConfig) -> Mapping[str, Any]:
    """The fields of a config that are part of the key, as they were given: all that are not marked."""
    apart = {n for n, info in type(config).model_fields.items() if info.json_schema_extra == NOT_TRACED}
    return config.model_dump(mode="json", exclude=apart)


def traced_paths() -> list[Path]:
    """The rooms of this package that saved programs were traced from: all that their modules import."""
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
        # What else the runner's room holds decides what is launched, and no traced code.
        waiting -= found | {runner}
    return sorted(found)
