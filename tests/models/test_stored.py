"""Repositories of fine-tunes: tensors that contradict config.json, and adapters."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compiled_mtp.models.hf_config import read_model_config
from compiled_mtp.models.weights import check_weights, load_weights
from tests.checkpoints import allocate, write_checkpoint
from tests.oracle import oracle

EMBEDDING = "model.language_model.embed_tokens.weight"
SMALL: dict[str, Any] = {"hidden_size": 64, "num_value_heads": 1, "intermediate_size": 64}


def change(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    file = directory / "model.safetensors"
    save_file(load_file(file) | tensors, file)


def load(directory: Path, *, with_mtp: bool = True) -> dict[str, Any]:
    config = read_model_config(directory)
    check_weights(config, directory, {}, torch.float32, with_mtp=with_mtp, free_bytes=2**40)
    parameters = allocate(config, with_mtp)
    load_weights(config, directory, parameters, with_mtp=with_mtp)
    assert all(parameter.isfinite().all() for parameter in parameters.values())
    return parameters


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_head_equal_to_the_embedding_is_skipped_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, dtype: torch.dtype
) -> None:
    directory = write_checkpoint(tmp_path, tied=True, **SMALL)
    embedding = load_file(directory / "model.safetensors")[EMBEDDING]
    change(directory, {"lm_head.weight": embedding.clone().to(dtype)})
    with caplog.at_level(logging.INFO):
        assert "lm_head.weight" not in load(directory)
    assert "lm_head.weight is the embedding once more; it is skipped" in caplog.text
    assert read_model_config(directory).tie_word_embeddings


@torch.no_grad()
def test_a_head_of_its_own_is_used_as_transformers_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = write_checkpoint(tmp_path, tied=True, **SMALL)
    embedding = load_file(directory / "model.safetensors")[EMBEDDING]
    head = embedding.clone()
    # The head differs in the last row alone, after the first chunk of rows that is compared.
    head[-1] += 1
    change(directory, {"lm_head.weight": head})
    assert torch.equal(load(directory)["lm_head.weight"], head.float())
    assert "but lm_head.weight differs from it: it is used as the head" in caplog.text
    theirs = oracle(directory).model
    assert torch.equal(theirs.lm_head.weight, head.float())
    assert torch.equal(theirs.model.embed_tokens.weight, embedding.float())


@pytest.mark.parametrize("section", [None, "text_config"])
def test_either_section_of_config_json_ties_the_head(tmp_path: Path, section: str | None) -> None:
    directory = write_checkpoint(tmp_path, tied=True, **SMALL)
    content = json.loads((directory / "config.json").read_text())
    (content[section] if section else content)["tie_word_embeddings"] = False
    (directory / "config.json").write_text(json.dumps(content))
    assert "lm_head.weight" not in load(directory)
    content["tie_word_embeddings"] = content["text_config"]["tie_word_embeddings"] = False
    (directory / "config.json").write_text(json.dumps(content))
    with pytest.raises(
        ValueError, match=r"missing tensors: lm_head.weight in .*; if its head is tied to the"
    ):
        load(directory)


def test_a_head_of_another_shape_is_misfitting(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, tied=True, **SMALL)
    change(directory, {"lm_head.weight": torch.zeros(513, 64)})
    with pytest.raises(ValueError, match=r"lm_head.weight of shape \[513, 64\] for \[512, 64\]"):
        load(directory)


@pytest.mark.parametrize("is_complete", [True, False])
def test_a_stored_mtp_head_that_config_json_denies_is_used(tmp_path: Path, is_complete: bool) -> None:
    directory = write_checkpoint(tmp_path, **SMALL)
    content = json.loads((directory / "config.json").read_text())
    content["text_config"]["mtp_num_hidden_layers"] = 0
    (directory / "config.json").write_text(json.dumps(content))
    assert read_model_config(directory).mtp_num_layers == 1
    if is_complete:
        assert "mtp.fc.weight" in load(directory)
        return
    tensors = load_file(directory / "model.safetensors")
    del tensors["mtp.fc.weight"]
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing tensors: mtp.fc.weight"):
        load(directory)
    assert "mtp.fc.weight" not in load(directory, with_mtp=False)


@pytest.mark.parametrize("has_config", [True, False])
def test_an_adapter_is_named(tmp_path: Path, has_config: bool) -> None:
    directory = write_checkpoint(tmp_path, **SMALL) if has_config else tmp_path
    (directory / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"adapter.*as lora"):
        read_model_config(directory)


@pytest.mark.parametrize(
    "name",
    [
        "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight",
        "model.language_model.layers.0.mlp.up_proj.base_layer.weight",
        "model.language_model.lm_head.modules_to_save.default.weight",
    ],
)
def test_an_adapters_tensors_are_named_as_such(tmp_path: Path, name: str) -> None:
    directory = write_checkpoint(tmp_path, **SMALL)
    change(directory, {name: torch.zeros(8, 64)})
    with pytest.raises(ValueError, match=rf"unused tensors: {name} in .*; these are an adapter's: pass the"):
        load(directory)
