"""The vision tower against transformers', in slices, and the checks of its weights and config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compiled_mtp.models.hf_config import read_model_config
from compiled_mtp.vision.images import PreparedImage, prepare_image
from compiled_mtp.vision.sizes import PART_PATCHES
from compiled_mtp.vision.tower import VisionTower
from compiled_mtp.vision.weights import load_tower
from tests.vision.checkpoints import (
    DEPTH,
    VisionOracle,
    picture,
    write_preprocessor,
    write_vision_checkpoint,
)


def make_tower(directory: Path) -> VisionTower:
    config = read_model_config(directory, max_pixels=1 << 20).vision
    assert config is not None
    return load_tower(config, directory, torch.float32, torch.device("cpu"), is_checked=True)


def features(tower: VisionTower, image: PreparedImage, slice_parts: int) -> torch.Tensor:
    pixels = torch.frombuffer(bytearray(image.pixels), dtype=torch.uint8)
    passage = tower.embed(pixels.view(image.rows * 32, image.columns * 32, 3))
    count = tower.count_parts(image.rows * image.columns)
    for first in range(0, count, slice_parts):
        tower.run(passage, first, min(first + slice_parts, count))
    return tower.merge(passage)


@pytest.mark.parametrize("part_patches", [PART_PATCHES, 32])
def test_features_equal_those_of_transformers(
    dense: Path, dense_oracle: VisionOracle, part_patches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one slice and in several, that end between layers and inside one."""
    for module in ("sizes", "tower"):
        monkeypatch.setattr(f"compiled_mtp.vision.{module}.PART_PATCHES", part_patches)
    tower = make_tower(dense)
    for width, height in ((333, 100), (64, 64), (96, 32)):
        image = picture(width, height, seed=width)
        prepared = prepare_image(image, tower.config)
        count = tower.count_parts(prepared.rows * prepared.columns)
        assert count == DEPTH * -(-prepared.rows * prepared.columns * 4 // part_patches)
        whole, *sliced = (features(tower, prepared, parts) for parts in (count, 1, 3))
        assert all(torch.equal(whole, one) for one in sliced)
        want = dense_oracle.features(image)
        assert float(want.std()) > 1
        torch.testing.assert_close(whole, want, rtol=0, atol=3e-5)


def test_every_parameter_comes_from_the_checkpoint(dense: Path) -> None:
    stored = load_file(dense / "model.safetensors")
    for name, parameter in make_tower(dense).named_parameters():
        assert torch.equal(parameter, stored[f"model.visual.{name}"].float().view(parameter.shape)), name


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    return write_vision_checkpoint(tmp_path)


def rewrite(directory: Path, file: str, **changes: Any) -> None:
    values = json.loads((directory / file).read_text())
    (directory / file).write_text(json.dumps(values | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"deepstack_visual_indexes": [1]}, r"deepstack_visual_indexes must be \[\], got \[1\]; deepstack"),
        ({"hidden_act": "gelu"}, "vision_config.hidden_act must be gelu_pytorch_tanh, got gelu"),
        ({"num_position_embeddings": 145}, "num_position_embeddings must be a square, got 145"),
        ({"num_heads": 7}, "vision_config.hidden_size must give heads of a multiple of 4"),
        ({"out_hidden_size": 64}, r"out_hidden_size must equal the text model's hidden_size \(128\), got 64"),
        ({"depth": 0}, "depth must be an integer of at least 1, got 0"),
        ({"patch_size": 14}, "patch_size must be 14 in preprocessor_config.json"),
        ({"temporal_patch_size": 10**30}, "temporal_patch_size must be at most 64, got 1000000"),
        ({"hidden_size": 1 << 40}, "hidden_size must be at most 65536, got 1099511627776"),
    ],
)
def test_a_config_that_is_not_supported_is_named(broken, changes, message):
    values = json.loads((broken / "config.json").read_text())
    values["vision_config"] |= changes
    (broken / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=message):
        read_model_config(broken, max_pixels=1 << 20)
    # Without images nothing of it is read.
    assert read_model_config(broken).vision is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mrope_interleaved": False}, "mrope_interleaved must be true"),
        ({"mrope_section": [11, 11, 11]}, r"mrope_section must add up to 32, .* got \[11, 11, 11\]"),
        ({"mrope_section": [8, 12, 12]}, r"mrope_section must give time the most .* got \[8, 12, 12\]"),
        ({"mrope_section": "11"}, "mrope_section must be a list of three counts"),
        ({"mrope_section": [11, 11]}, "mrope_section must be a list of three counts"),
    ],
)
def test_positions_that_are_not_supported_are_named(broken, changes, message):
    values = json.loads((broken / "config.json").read_text())
    values["text_config"]["rope_parameters"] |= changes
    (broken / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=message):
        read_model_config(broken, max_pixels=1 << 20)


def test_the_area_of_an_image(broken):
    write_preprocessor(broken, least=65536, most=16777216)
    vision = read_model_config(broken, max_pixels=1310720).vision
    assert (vision.least_pixels, vision.most_pixels) == (65536, 1310720)
    with pytest.raises(ValueError, match="max_pixels must be at least 65536"):
        read_model_config(broken, max_pixels=65535)
    # Some repositories have one file for all processors, and older ones other names.
    old = json.loads((broken / "preprocessor_config.json").read_text())
    old |= {"size": {}, "min_pixels": 4096, "max_pixels": 8192}
    (broken / "preprocessor_config.json").unlink()
    (broken / "processor_config.json").write_text(json.dumps({"image_processor": old}))
    vision = read_model_config(broken, max_pixels=1310720).vision
    assert (vision.least_pixels, vision.most_pixels) == (4096, 8192)
    (broken / "processor_config.json").unlink()
    with pytest.raises(ValueError, match=r"max_images must be 0 without a preprocessor_config.json"):
        read_model_config(broken, max_pixels=1310720)


def test_a_checkpoint_without_a_tower_is_refused(broken):
    values = json.loads((broken / "config.json").read_text())
    del values["vision_config"]
    (broken / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match="max_images must be 0 for a checkpoint without a vision_config"):
        read_model_config(broken, max_pixels=1310720)


@pytest.mark.parametrize(
    ("name", "weight", "message"),
    [
        ("blocks.1.norm1.bias", None, "missing: blocks.1.norm1.bias"),
        ("deepstack_merger_list.0.norm.weight", torch.ones(4), "unused: model.visual.deepstack_merger"),
        ("blocks.0.attn.proj.weight", torch.ones(96, 95), r"misfitting: model.visual.blocks.0.attn.proj"),
        (
            "blocks.0.norm1.weight",
            torch.ones(96, dtype=torch.int8),
            "misfitting: model.visual.blocks.0",
        ),
        (
            "merger.norm.bias",
            torch.full((96,), torch.nan),
            "NaN or infinity in merger.norm.bias",
        ),
    ],
)
def test_weights_that_do_not_fit_are_named(broken, name, weight, message):
    file, name = broken / "model.safetensors", f"model.visual.{name}"
    stored = {n: w for n, w in load_file(file).items() if n != name}
    save_file(stored if weight is None else stored | {name: weight}, file)
    with pytest.raises(ValueError, match=message):
        make_tower(broken)
