"""Stored tensors against the config: compared before memory is allocated, named in one line."""

from __future__ import annotations

import json
import math
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compiled_mtp.config import EngineConfig
from compiled_mtp.engine import Engine
from compiled_mtp.models.headers import read_headers
from compiled_mtp.models.hf_config import read_model_config
from compiled_mtp.models.weights import check_weights, load_weights, read_formats
from tests.checkpoints import FP8_FAMILIES, write_checkpoint
from tests.models.stored_files import file_of, layout_of, rewrite

CPU = torch.device("cpu")


def check_error(directory: Path, free_bytes: int = 2**40) -> str:
    """Return the message of the one error, which must come within a second and before memory is allocated."""
    begin = time.perf_counter()
    config = read_model_config(directory)

    def check() -> None:
        formats = read_formats(config, directory, CPU, "w8a16")
        check_weights(config, directory, formats, torch.float32, with_mtp=True, free_bytes=free_bytes)

    with pytest.raises(ValueError, match=r"^\w[\w ]* must ") as error:
        check()
    assert time.perf_counter() - begin < 1.0
    assert len(str(error.value)) < 3000
    assert str(error.value).isprintable()
    return str(error.value)


def edit_text(directory: Path, changes: dict[str, Any]) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config.get("text_config", config).update(changes)
    path.write_text(json.dumps(config))


@pytest.mark.usefixtures("keeps")
@pytest.mark.parametrize("family", ["dense", "moe", "next"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 10**9}, "misfitting tensors: "),
        ({"vocab_size": 10**7}, "embed_tokens.weight of shape [512, 256] for [10000000, 256]"),
        ({"num_attention_heads": 10**9}, "o_proj.weight of shape [256, 512] for [256, 256000000000]"),
        (
            {"num_hidden_layers": 4000, "layer_types": None},
            "num_hidden_layers must be the number of stored layers (4), got 4000; fix config.json or",
        ),
        (
            {"linear_num_key_heads": 10**9, "linear_num_value_heads": 10**9},
            "linear_num_value_heads must be at most ",
        ),
    ],
)
def test_sizes_are_compared_before_anything_is_allocated(
    tmp_path: Path, family: str, changes: dict[str, Any], message: str
) -> None:
    directory = write_checkpoint(tmp_path, **dict(FP8_FAMILIES)[family])
    edit_text(directory, changes)
    assert message in check_error(directory)


def test_a_number_of_experts_is_compared_before_they_are_counted(tmp_path: Path) -> None:
    for name, experts in (("a", "stacked"), ("b", "per_expert")):
        directory = write_checkpoint(tmp_path / name, "qwen3_5_moe", trunk_experts=experts)
        edit_text(directory, {"num_experts": 10**9})
        assert "num_experts must be at most 8, as stored, got 1000000000; fix" in check_error(directory)


def test_weights_that_do_not_fit_memory_are_one_line(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path)
    config = read_model_config(directory)
    needed = sum(math.prod(stored.shape) for stored in layout_of(config).values()) * 4
    message = check_error(directory, needed - 1)
    assert re.match(r"free memory must hold 0\.0 GiB of weights, got 0\.0 GiB for .*; use a smaller", message)
    check_weights(config, directory, {}, torch.float32, with_mtp=True, free_bytes=needed)


def test_an_engine_compares_before_it_allocates(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path)
    edit_text(directory, {"intermediate_size": 10**9})
    with pytest.raises(ValueError, match=r"gate_proj.weight of shape \[192, 128\] for \[1000000000, 128\]"):
        Engine(EngineConfig(model=directory, device="cpu", max_model_len=128))
    edit_text(directory, {"intermediate_size": 192})
    stretch(directory, 2**28)
    with pytest.raises(ValueError, match=r"^free memory must .*; use a smaller model or more memory$"):
        Engine(EngineConfig(model=directory, device="cpu", max_model_len=128))


def stretch(directory: Path, intermediate_size: int) -> None:
    """Give the checkpoint MLPs of that width, in a sparse file of terabytes."""
    edit_text(directory, {"intermediate_size": intermediate_size})
    file = directory / "model.safetensors"
    content = file.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    header.pop("__metadata__")
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        if name.endswith(("gate_proj.weight", "up_proj.weight")):
            entry["shape"][0] = intermediate_size
        elif name.endswith("down_proj.weight"):
            entry["shape"][1] = intermediate_size
        begin, size = end, math.prod(entry["shape"]) * {"F32": 4, "BF16": 2}[entry["dtype"]]
        end = begin + size
        entry["data_offsets"] = [begin, end]
    text = file_of(header)
    with file.open("wb") as stream:
        stream.write(text)
        stream.truncate(len(text) + end)


def test_a_prefix_is_named_and_the_first_few_tensors(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path)
    config = read_model_config(directory)
    tensors = load_file(directory / "model.safetensors")
    save_file({f"base_model.model.{n}": w for n, w in tensors.items()}, directory / "model.safetensors")
    with pytest.raises(ValueError, match="must hold exactly") as error:
        load_weights(config, directory, {}, with_mtp=False)
    message = str(error.value)
    stored = [n for n in read_headers(directory) if "visual" not in n]
    assert f"unused tensors: {', '.join(list(read_headers(directory))[:5])} and " in message
    assert message.count("base_model.model.") == 6
    assert len(stored) > 10
    assert message.endswith(
        "; the names begin with base_model.model.model.language_model., PEFT's: save the model without it"
    )


def test_names_of_tensors_are_escaped_and_bounded(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path)
    rewrite(directory, {"\x1b[2J\n" + "x" * 100_000: torch.zeros(1)})
    message = check_error(directory)
    assert "unused tensors: \\x1b[2J\\nxxx" in message
    assert "x... (100005 characters) in " in message
