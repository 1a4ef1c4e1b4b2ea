"""How FP8 weights are multiplied: the setting, the weights that it covers, and where it is reported."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_mtp.config import EngineConfig
from compiled_mtp.models.family import FAMILIES as MODEL_FAMILIES
from compiled_mtp.models.headers import read_headers
from compiled_mtp.models.hf_config import read_model_config
from compiled_mtp.models.shards import shard_layout
from compiled_mtp.models.weight_format import FP8, W8A8, W8A8_VALUES, resolve_recipe
from compiled_mtp.models.weights import load_weights, read_formats
from tests.checkpoints import FP8_FAMILIES, allocate, write_checkpoint
from tests.engines import make_engine

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("dense"), **dict(FP8_FAMILIES)["dense"])


def test_which_recipe_a_device_has(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability in ((9, 0), (10, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        for device in (CPU, CUDA):
            assert resolve_recipe("auto", has_fp8=True, device=device) == "w8a8"
            for recipe in ("w8a8", "w8a16"):
                assert resolve_recipe(recipe, has_fp8=True, device=device) == recipe
    assert resolve_recipe("auto", has_fp8=False, device=CPU) is None
    # The last device has all that W8A8 needs except shared memory: 99 KiB.
    for major, minor in ((8, 9), (12, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=(major, minor): c)
        assert resolve_recipe("auto", has_fp8=True, device=CUDA) == "w8a16"
        message = (
            "weight_recipe must be w8a16 below compute capability 9.0, and where a program has less than 144 "
            f"KiB of shared memory, got w8a8 on {major}.{minor}; use auto or another GPU"
        )
        with pytest.raises(ValueError, match=re.escape(message)):
            resolve_recipe("w8a8", has_fp8=True, device=CUDA)


@pytest.mark.parametrize("recipe", ["w8a8", "w8a16"])
def test_a_recipe_is_refused_for_a_checkpoint_without_fp8(tmp_path: Path, recipe: Any) -> None:
    directory = write_checkpoint(tmp_path)
    message = f"weight_recipe must be auto for a checkpoint without FP8 weights, got {recipe}; drop it"
    with pytest.raises(ValueError, match=message):
        make_engine(directory, weight_recipe=recipe)
    rule = r"weight_recipe must be 'auto', 'w8a8' or 'w8a16', got 'fp4'; choose"
    with pytest.raises(ValueError, match=rule):
        EngineConfig(weight_recipe="fp4")  # type: ignore[arg-type]


def test_the_recipe_is_in_the_key_and_in_the_start_line(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = []
    for recipe in ("auto", "w8a8", "w8a16"):
        caplog.clear()
        with caplog.at_level("INFO", logger="compiled_mtp"):
            engine = make_engine(directory, mtp_step=0, num_blocks=34, weight_recipe=recipe)
        keys.append(engine.runner.cache_key())
        assert engine.weight_recipe == keys[-1]["weight_recipe"]
        name = "w8a16" if recipe == "w8a16" else "w8a8"
        wanted = f"MiB of weights (FP8 as {name}, multiplied out), "
        assert sum(wanted in line for line in caplog.messages) == 1
    assert keys[0] == keys[1]
    differing = {name for name in keys[0] if keys[0][name] != keys[2][name]}
    assert differing == {"weight_recipe", "weight_formats"}


def test_rows_are_quantised_in_whole_groups_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight whose columns are no multiple of 128 is multiplied with unquantised rows."""
    options = dict(FP8_FAMILIES)["dense"] | {"intermediate_size": 320, "hidden_size": 128, "num_layers": 4}
    directory = write_checkpoint(tmp_path, **options)
    config = read_model_config(directory)
    on_cpu = read_formats(config, directory, CPU, "w8a8")
    assert set(on_cpu.values()) == {W8A8_VALUES}
    assert "layers.0.mixer.in_proj.weight" in on_cpu
    assert not any(name.endswith("ffn.down.weight") for name in on_cpu)
    monkeypatch.setattr("compiled_mtp.ops.fp8.converts_fp8", lambda device: True)
    kept = read_formats(config, directory, CPU, "w8a8")
    downs = {name for name in kept if name.endswith("ffn.down.weight")}
    assert len(downs) == 5
    assert {name: form for name, form in kept.items() if name not in downs} == dict.fromkeys(on_cpu, W8A8)
    assert {kept[name] for name in downs} == {FP8}


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_rank_holds_whole_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_kept: bool) -> None:
    """Kept in FP8 or dequantised, a cut through a group of 128 columns would change its rows' scales."""
    monkeypatch.setattr("compiled_mtp.ops.fp8.converts_fp8", lambda device: is_kept)
    sizes = {"num_value_heads": 4, "intermediate_size": 512}
    for width, message in ((512, None), (384, r"^layers.0.ffn.gate_up.weight must be cut at its blocks")):
        options = dict(FP8_FAMILIES)["dense"] | sizes | {"intermediate_size": width}
        directory = write_checkpoint(tmp_path / str(width), **options)
        config = read_model_config(directory)
        formats = read_formats(config, directory, CPU, "w8a8")
        assert set(formats.values()) == {W8A8 if is_kept else W8A8_VALUES}
        layout = MODEL_FAMILIES[config.family].layout(config, read_headers(directory), formats)
        if message is not None:
            with pytest.raises(ValueError, match=message):
                shard_layout(layout, config, formats, 0, 2)
            continue
        whole = allocate(config, formats=formats)
        load_weights(config, directory, whole, with_mtp=True, formats=formats)
        part = allocate(config.shard(1, 2), formats=formats)
        load_weights(config, directory, part, with_mtp=True, formats=formats, rank=1, world=2)
        name = "layers.0.ffn.down.weight"
        assert torch.equal(part[name].float(), whole[name][:, 256:].float())
        assert (name + "_scale" in part) == is_kept
