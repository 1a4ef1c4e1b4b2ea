"""How the runner chooses to replay a compiled step."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_mtp.config import EngineConfig
from compiled_mtp.graphs.artifacts import KEY_NAME
from compiled_mtp.runner.graph_choice import choose_compiled, choose_graph_mode

SMALL, LARGE = 10 << 20, 2 << 30


@pytest.mark.parametrize(
    "options, device, weight_bytes, mode",
    [
        ({"compile": "off"}, "cuda", LARGE, "replay"),
        ({"compile": "off", "graph_mode": "reduce-overhead"}, "cuda", LARGE, "replay"),
        ({"compile": "off", "graph_mode": "off"}, "cuda", LARGE, None),
        ({"compile": "off"}, "cpu", LARGE, None),
        ({"graph_mode": "off"}, "cuda", LARGE, None),
        # A reference may read values on the host.
        ({"compile": "off", "reference_ops": "sample"}, "cuda", LARGE, None),
        ({"reference_ops": "sample"}, "cuda", LARGE, None),
        ({"graph_mode": "replay", "reference_ops": "linear"}, "cuda", LARGE, "replay"),
        ({}, "cuda", LARGE, "reduce-overhead"),
        ({}, "cuda", SMALL, "replay"),
        ({"graph_mode": "replay"}, "cuda", LARGE, "replay"),
        ({"graph_mode": "reduce-overhead"}, "cuda", SMALL, "reduce-overhead"),
        ({"graph_mode": "replay"}, "cpu", LARGE, None),
    ],
)
def test_the_form_follows_the_config_and_then_the_model(
    options: dict[str, Any], device: str, weight_bytes: int, mode: str | None
) -> None:
    config, place = EngineConfig(**options), torch.device(device)
    is_compiled = choose_compiled(config, place)
    assert choose_graph_mode(config, place, weight_bytes, is_compiled=is_compiled) == mode


@pytest.mark.parametrize(
    "options, device, is_compiled",
    [
        ({}, "cuda", True),
        ({"compile": "off"}, "cuda", False),
        ({}, "cpu", False),
        ({"compile": "on"}, "cpu", True),
        ({"graph_cache": Path("made.zip")}, "cpu", True),
        ({"graph_cache": Path("made.zip"), "compile": "off"}, "cpu", False),
    ],
)
def test_a_cpu_compiles_only_when_told_to(options: dict[str, Any], device: str, is_compiled: bool) -> None:
    assert choose_compiled(EngineConfig(**options), torch.device(device)) is is_compiled


@pytest.mark.parametrize("made_for", ["replay", "reduce-overhead"])
def test_auto_is_what_the_cache_was_made_for(tmp_path: Path, made_for: str) -> None:
    file = tmp_path / "graphs.zip"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(KEY_NAME, json.dumps({"graph_mode": made_for}))
    config, place = EngineConfig(graph_cache=file), torch.device("cuda")
    for weight_bytes in (SMALL, LARGE):
        assert choose_graph_mode(config, place, weight_bytes, is_compiled=True) == made_for
