"""The key of a graph cache: settings, source, machine."""

from __future__ import annotations

import json
import platform
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_mtp.config import EngineConfig
from compiled_mtp.graphs import artifacts
from compiled_mtp.graphs.artifacts import machine_key, source_digest
from compiled_mtp.model_config import NOT_TRACED, ModelConfig
from compiled_mtp.models.hf_config import read_model_config
from compiled_mtp.runner.cache_key import early_key, traced_paths
from compiled_mtp.runner.spec import EngineSpec, resolve


def test_the_digest_follows_code_and_tables(tmp_path: Path) -> None:
    """A table decides the shapes of partials, and so the programs, as code does."""
    package = tmp_path / "ops"
    package.mkdir()
    (package / "op.py").write_text("a = 1")
    digests = {source_digest([package])}
    (package / "table.json").write_text("[1]")
    digests.add(source_digest([package]))
    (package / "table.json").write_text("[2]")
    digests.add(source_digest([package]))
    (package / "notes.txt").write_text("not read")
    assert source_digest([package]) in digests
    assert len(digests) == 3


def spec_of(config: EngineConfig) -> EngineSpec:
    return resolve(config, read_model_config(config.model), 4096)


def test_a_field_is_part_of_the_key_until_it_is_marked() -> None:
    """For fields of a config, of a model and of the spec."""

    class NewConfig(EngineConfig):
        new_setting: int = 3

    @dataclass(frozen=True)
    class NewModel(ModelConfig):
        new_size: int = 4

    @dataclass(frozen=True)
    class NewSpec(EngineSpec):
        new_number: int = 5
        new_wish: int = field(default=6, metadata=NOT_TRACED)

    config = NewConfig(device="cpu", num_threads=1)
    spec, model = spec_of(config), read_model_config(config.model)
    given = {one.name: getattr(spec, one.name) for one in fields(EngineSpec)}
    sizes = {one.name: getattr(model, one.name) for one in fields(ModelConfig)}
    key, new = early_key(spec), early_key(NewSpec(**given | {"model": NewModel(**sizes)}))
    assert key["new_setting"] == 3
    assert new == key | {"model.new_size": 4, "new_number": 5}


def test_the_key_holds_resolved_settings() -> None:
    config = EngineConfig(device="cpu", draft_vocab=100, mtp_step=2, seed=1, num_blocks=40)
    key = json.loads(json.dumps(early_key(spec_of(config))))
    wanted = {
        "device": "cpu",
        "dtype": "float32",
        "kv_dtype": "float32",
        "mtp_step": 2,
        "lookup": ["mtp", "lookup"],
        "shapes": [[2, 2]],
        "prefill_chunk": 512,
        "communicator": None,
        "weight_recipe": None,
        "num_threads": torch.get_num_threads(),
    }
    assert {name: key[name] for name in wanted} == wanted
    assert key["drafts"]["num_ids"] >= 100
    apart = {"model", "seed", "num_blocks", "graph_mode", "batch_sizes", "draft_vocab", "compile"}
    assert not apart & key.keys()
    assert not {f"model.{name}" for name in ("dtype", "quantized", "eos_token_ids")} & key.keys()


def test_the_digest_covers_what_traced_code_imports() -> None:
    """It covers rooms below the step, and no room that only decides the launches."""
    names = [path.name for path in traced_paths()]
    rooms = ["cache", "communicators", "files", "gguf", "graphs", "models", "ops", "rounds", "vision"]
    modules = ["errors.py", "model_config.py", "plan.py", "step.py", "step_output.py"]
    modules += ["program_maker.py", "programs.py", "static_inputs.py"]
    assert sorted(names) == sorted(rooms + modules)


def test_the_key_holds_what_torch_compares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    key = machine_key(torch.device("cuda"))
    assert key["python"] == platform.python_version()
    assert (key["capability"], key["cuda"], key["gpu"]) == ("sm_90", "13.0", "NVIDIA H200")


def test_the_key_of_a_cpu_follows_its_instruction_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def key(text: str) -> Any:
        (tmp_path / "cpuinfo").write_text(text)
        monkeypatch.setattr(artifacts, "CPUINFO", tmp_path / "cpuinfo")
        return machine_key(torch.device("cpu"))["cpu"]

    plain = key("processor\t: 0\nflags\t\t: fpu avx avx2 fma\n\nprocessor\t: 1\nflags\t\t: fpu\n")
    assert key("flags : fma avx2 avx hypervisor\n") == plain, "order and other flags say nothing about code"
    others = {key("flags : avx avx2 fma avx512f\n"), key("Features : fp asimd sve\n")}
    assert len(others | {plain}) == 3
    assert key("processor : 0\n") == "unknown"
    monkeypatch.setattr(artifacts, "CPUINFO", tmp_path / "absent")
    assert machine_key(torch.device("cpu"))["cpu"] == "unknown"
