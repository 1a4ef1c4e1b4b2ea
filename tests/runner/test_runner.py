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
from compiled_mtp.models.hf_config import read_model_config
from compiled_mtp.runner.spec import EngineSpec, apply, choose_graph_mode, resolve

SMALL, LARGE = 10 << 20, 2 << 30


def spec_of(monkeypatch: pytest.MonkeyPatch, device: str, **options: Any) -> EngineSpec:
    """Return the spec of the default checkpoint on a device that need not exist."""
    monkeypatch.setattr("compiled_mtp.runner.spec.resolve_device", lambda name: torch.device(device))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr("compiled_mtp.models.draft_weights.memory_of", lambda device: 80 << 30)
    config = EngineConfig(**options)
    return resolve(config, read_model_config(config.model), 4096)


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
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], device: str, weight_bytes: int, mode: str | None
) -> None:
    assert choose_graph_mode(spec_of(monkeypatch, device, **options), weight_bytes) == mode


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
def test_a_cpu_compiles_only_when_told_to(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], device: str, is_compiled: bool
) -> None:
    assert spec_of(monkeypatch, device, **options).is_compiled is is_compiled


@pytest.mark.parametrize("made_for", ["replay", "reduce-overhead"])
def test_auto_is_what_the_cache_was_made_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, made_for: str
) -> None:
    file = tmp_path / "graphs.zip"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(KEY_NAME, json.dumps({"graph_mode": made_for}))
    spec = spec_of(monkeypatch, "cuda", graph_cache=file)
    for weight_bytes in (SMALL, LARGE):
        assert choose_graph_mode(spec, weight_bytes) == made_for


def test_to_resolve_sets_nothing_and_says_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    set_to: list[Any] = []
    monkeypatch.setattr("torch.set_num_threads", set_to.append)
    monkeypatch.setattr("compiled_mtp.runner.spec.use_reference", set_to.append)
    with caplog.at_level("INFO"):
        spec = spec_of(monkeypatch, "cpu", num_threads=1, reference_ops="sample", graph_mode="replay")
        assert (set_to, caplog.messages) == ([], [])
        apply(spec)
    assert set_to == [1, ("sample",)]
    assert [line.partition(":")[0] for line in caplog.messages] == [
        "running uncompiled",
        "operators on their reference",
    ]
    assert resolve(spec.config, spec.model, 4096) == spec
