"""Rope scaling: the spellings of config.json, and the table that transformers computes."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compiled_mtp.config import EngineConfig
from compiled_mtp.config.defaults import resolve_max_model_len
from compiled_mtp.model_config import RopeScaling
from compiled_mtp.models.hf_config import read_model_config
from compiled_mtp.models.rotary import rotary_table
from compiled_mtp.runner.cache_key import traced
from tests.checkpoints import ROPE_FAMILIES, YARN, write_checkpoint
from tests.gguf_files import write_gguf

LENGTH = 600
SCALINGS: dict[str, dict[str, Any]] = {
    "yarn": YARN,
    "yarn of a release": YARN | {"original_max_position_embeddings": 262144},
    "yarn, attention factor": YARN | {"attention_factor": 1.3},
    "yarn, betas": YARN | {"beta_fast": 24, "beta_slow": 2.5},
    "yarn, betas of zero": YARN | {"beta_fast": 0, "beta_slow": None},
    "yarn, mscale": YARN | {"mscale": 1.2, "mscale_all_dim": 0.8},
    "yarn, half of mscale": YARN | {"mscale": 1.2},
    "yarn, not truncated": YARN | {"truncate": False},
    "yarn, no range": YARN | {"original_max_position_embeddings": 2},
    "yarn, ratio of lengths": YARN | {"factor": None},
    "yarn, original by default": {"rope_type": "yarn", "factor": 2.0},
    "yarn of factor 1": YARN | {"factor": 1.0},
    "linear": {"rope_type": "linear", "factor": 3.0},
}


def theirs(directory: Path) -> torch.Tensor:
    from transformers import AutoConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

    config = AutoConfig.from_pretrained(directory)
    embedding = Qwen3_5TextRotaryEmbedding(config.get_text_config())
    cos, sin = embedding(torch.zeros(1), torch.arange(LENGTH)[None])
    half = cos.shape[-1] // 2
    # They repeat each angle for the two dims that turn together.
    return torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1)


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_the_table_is_that_of_transformers_to_the_bit(tmp_path: Path, scaling: dict[str, Any]) -> None:
    directory = write_checkpoint(tmp_path, rope=scaling)
    ours = rotary_table(read_model_config(directory), LENGTH, torch.device("cpu"))
    assert torch.equal(ours, theirs(directory))


def respell(directory: Path, changes: dict[str, Any]) -> None:
    """Give a flat checkpoint the old spelling of the rotary embedding."""
    content = json.loads((directory / "config.json").read_text())
    del content["rope_parameters"]
    (directory / "config.json").write_text(json.dumps(content | changes))


@pytest.mark.parametrize("kind", ["rope_type", "type"])
def test_the_old_spelling_means_the_same(tmp_path: Path, kind: str) -> None:
    new = write_checkpoint(tmp_path / "new", flat=True, rope=YARN)
    old = write_checkpoint(tmp_path / "old", flat=True)
    scaling = {kind: "yarn", "factor": 4.0}
    outside = {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "original_max_position_embeddings": 64}
    respell(old, outside | {"rope_scaling": scaling})
    assert read_model_config(old) == read_model_config(new)
    expected = RopeScaling("yarn", 4.0, 64, attention_factor=0.1 * math.log(4) + 1)
    assert read_model_config(new).rope_scaling == expected


def test_the_original_length_outside_the_section_wins_as_in_transformers(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, flat=True, rope=YARN)
    content = json.loads((directory / "config.json").read_text())
    content["original_max_position_embeddings"] = 128
    (directory / "config.json").write_text(json.dumps(content))
    model = read_model_config(directory)
    assert model.rope_scaling is not None
    assert model.rope_scaling.original_length == 128
    assert torch.equal(rotary_table(model, LENGTH, torch.device("cpu")), theirs(directory))


def test_a_graph_cache_is_for_one_scaling(tmp_path: Path) -> None:
    found = []
    for name, scaling in (("plain", None), ("yarn", YARN), ("longer", YARN | {"factor": 8.0})):
        model = read_model_config(write_checkpoint(tmp_path / name, rope=scaling))
        found.append(json.dumps(traced(model)))
    assert len(set(found)) == 3


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        (YARN | {"original_max_position_embeddings": 4096}, 16384),
        (YARN, 4096),
        ({"rope_type": "linear", "factor": 2.0, "original_max_position_embeddings": 4096}, 8192),
        # Without the original length, max_position_embeddings may be scaled already.
        ({"rope_type": "linear", "factor": 2.0}, 4096),
    ],
)
def test_a_text_may_be_as_long_as_the_scaling_allows(
    tmp_path: Path, scaling: dict[str, Any], longest: int
) -> None:
    model = read_model_config(write_checkpoint(tmp_path, rope=scaling))
    assert resolve_max_model_len(EngineConfig(), model) == longest
    with pytest.raises(ValueError, match=f"max_model_len must be at most {longest}"):
        resolve_max_model_len(EngineConfig(max_model_len=longest + 1), model)


@pytest.mark.parametrize(("name", "options"), ROPE_FAMILIES, ids=[name for name, _ in ROPE_FAMILIES])
def test_a_gguf_file_has_the_scaling_of_its_checkpoint(
    tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    directory = write_checkpoint(tmp_path / "model", **options)
    file = write_gguf(directory, tmp_path / "model.gguf")
    ours, wanted = read_model_config(file), read_model_config(directory)
    assert ours.rope_scaling == wanted.rope_scaling
    assert ours.max_position_embeddings == wanted.max_position_embeddings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope.scaling.type": "longrope"}, "rope_type must be default, linear or yarn, got longrope"),
        ({"rope.scaling.attn_factor": np.float32(1.5)}, "rope.scaling.attn_factor must be 1.0, got 1.5"),
        ({"rope.scaling.factor": np.float32(0)}, "rope.scaling.factor must be a positive number, got 0.0"),
    ],
)
def test_other_scalings_of_a_gguf_file_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    directory = write_checkpoint(tmp_path / "model", rope=YARN)
    named = {f"qwen35.{key}": value for key, value in changes.items()}
    file = write_gguf(directory, tmp_path / "model.gguf", changes=named)
    with pytest.raises(ValueError, match=re.escape(message)):
        read_model_config(file)
