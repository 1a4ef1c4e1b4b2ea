"""Files of a checkpoint that are broken, incomplete or do not belong together: each error names the file."""

from __future__ import annotations

import json
import re
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from compiled_mtp.models.headers import read_headers
from compiled_mtp.models.hf_config import read_model_config
from compiled_mtp.models.weights import load_weights
from tests.checkpoints import allocate, write_checkpoint
from tests.models.stored_files import file_of

CPU = torch.device("cpu")


def test_two_saves_in_one_folder_say_which_to_remove(tmp_path: Path) -> None:
    """transformers leaves an old index when it saves one file, and an old file when it saves shards."""
    directory = write_checkpoint(tmp_path, sharded=True)
    save_file({"model.language_model.norm.weight": torch.zeros(128)}, directory / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"got \['model.safetensors'\] in .*; remove the older save: "
    ) as error:
        read_headers(directory)
    assert str(error.value).endswith("these files, or the index with the files that it names")
    for shard in directory.glob("model-*.safetensors"):
        shard.unlink()
    with pytest.raises(ValueError, match=r"got no \['model-00001-of-00003.safetensors', ") as error:
        read_headers(directory)
    remedy = (
        "; remove model.safetensors.index.json if model.safetensors is the newer save, else download them"
    )
    assert str(error.value).endswith(remedy)
    (directory / "model.safetensors.index.json").unlink()
    assert [header.file.name for header in read_headers(directory).values()] == ["model.safetensors"]


def test_files_that_do_not_belong_together(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, sharded=True)
    stray = directory / "other.safetensors"
    save_file({"model.language_model.norm.weight": torch.zeros(128)}, stray)
    with pytest.raises(ValueError, match=r"no weights outside its index, got \['other.safetensors'\]"):
        read_headers(directory)
    stray.unlink()
    (directory / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match=r"got no \['model-00002-of-00003.safetensors'\]"):
        read_headers(directory)


def test_a_tensor_stored_twice(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path)
    save_file({"model.norm.weight": torch.zeros(128)}, directory / "more.safetensors")
    with pytest.raises(ValueError, match=r"must store each tensor once, got model.norm.weight in"):
        read_model_config(directory)


def test_no_weights(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="got none in"):
        read_headers(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(json.dumps({"a": 1}).encode())
    with pytest.raises(ValueError, match="must hold safetensors files"):
        read_headers(tmp_path)


def one_tensor(**changes: Any) -> dict[str, Any]:
    return {"mtp.norm.weight": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]} | changes}


BROKEN_FILES = {
    "cut": file_of(one_tensor(), b"123"),
    "trailing": file_of(one_tensor(), b"12345"),
    "span": file_of(one_tensor(shape=[3]), b"1234"),
    "hole": file_of(one_tensor(data_offsets=[2, 6]), b"123456"),
    "negative": file_of(one_tensor(shape=[-2]), b"1234"),
    "dtype": file_of(one_tensor(dtype=5), b"1234"),
    "list": file_of([]),
    "entry": file_of({"mtp.norm.weight": 5}),
    "keys": file_of({"mtp.norm.weight": {"dtype": "BF16"}}),
    "length": file_of(one_tensor(), b"1234", length=2**33),
    "empty": b"",
}


@pytest.mark.parametrize("content", BROKEN_FILES.values(), ids=BROKEN_FILES)
def test_a_broken_file_is_named_from_its_header(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(
            ValueError,
            match=r"^model must hold safetensors files, got .*model.safetensors \(.+\); download it",
        ):
            read_headers(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()


def test_a_download_cut_short_is_named_before_anything_is_copied(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path)
    config = read_model_config(directory)
    parameters = allocate(config)
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    for read in (
        lambda: read_headers(directory),
        lambda: load_weights(config, directory, parameters, with_mtp=True),
    ):
        with pytest.raises(ValueError, match=r"must hold safetensors files, got .*; download it again"):
            read()
    assert all(p.isnan().all() for p in parameters.values())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "must be a readable JSON file, got "),
        ("[" * 100_000, "must be a readable JSON file, got "),
        ("[]", "must hold a weight_map from tensors to files, got None"),
        ("{}", "must hold a weight_map from tensors to files, got None"),
        ('{"weight_map": ["a"]}', "must hold a weight_map from tensors to files, got ['a']"),
        ('{"weight_map": {"a": null}}', "must name files of its own folder, got None for a"),
        ('{"weight_map": {"a": ["b"]}}', "must name files of its own folder, got ['b'] for a"),
        ('{"weight_map": {"a": ""}}', "must name files of its own folder, got '' for a"),
        ('{"weight_map": {"a": ".."}}', "must name files of its own folder, got '..' for a"),
        ('{"weight_map": {"a": "../b.safetensors"}}', "must name files of its own folder, got '../b.safe"),
        ('{"weight_map": {"a": "/b.safetensors"}}', "must name files of its own folder, got '/b.safete"),
    ],
)
def test_a_broken_index_is_named(tmp_path: Path, content: str, message: str) -> None:
    directory = write_checkpoint(tmp_path)
    index = directory / "model.safetensors.index.json"
    index.write_text(content)
    with pytest.raises(ValueError, match=f"^{re.escape(f'{index} {message}')}.*; download it again$"):
        read_headers(directory)
