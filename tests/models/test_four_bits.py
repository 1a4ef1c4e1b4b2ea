"""Four-bit weights that stay codes: their values are the stored ones, in every format and on every rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_mtp.models import weight_format
from compiled_mtp.models.hf_config import read_model_config
from compiled_mtp.models.weight_format import Formats
from compiled_mtp.models.weights import check_weights, load_weights, read_formats
from compiled_mtp.ops.int4 import dequantize
from tests.checkpoints import allocate, write_checkpoint
from tests.models.test_quantised import FORMATS, SMALL, every_linear
from tests.quantised import quantise

CPU = torch.device("cpu")
# Dense models whose products are as wide as a unit.
SIZES: dict[str, Any] = SMALL | {"hidden_size": 256, "intermediate_size": 512}
INTEGERS = (
    "gptq",
    "gptq-g32-bf16",
    "gptq-row",
    "gptq-asym",
    "gptq-v2-asym",
    "auto-round-awq",
    "awq",
    "awq-g32",
    "pack",
    "pack-g64",
    "pack-channel-asym",
    "pack-asym",
)


@pytest.fixture(autouse=True)
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep codes on every device, as on a GPU."""
    monkeypatch.setattr(weight_format, "reads_int4", lambda device: True)


def loaded(directory: Path, formats: Formats, rank: int = 0, world: int = 1) -> dict[str, torch.Tensor]:
    config = read_model_config(directory)
    dtype = torch.bfloat16
    check_weights(config, directory, formats, dtype, with_mtp=True, free_bytes=2**40, rank=rank, world=world)
    parameters = allocate(config.shard(rank, world), True, dtype, formats)
    load_weights(config, directory, parameters, with_mtp=True, formats=formats, rank=rank, world=world)
    return parameters


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", INTEGERS)
def test_values_are_the_dequantised_ones(tmp_path: Path, name: str, world: int) -> None:
    packer, config = FORMATS[name]
    write_checkpoint(tmp_path, **SIZES)
    quantise(tmp_path, every_linear(packer), config)
    formats = read_formats(read_model_config(tmp_path), tmp_path, CPU, None)
    kept = {parameter for parameter, form in formats.items() if form.group}
    assert {parameter.split(".")[-2] for parameter in kept} == {
        *("qkv", "o_proj", "in_proj", "out_proj", "gate_up", "down")
    }
    assert any(parameter.startswith("mtp.") for parameter in kept)
    # Without codes, in_proj is also q|k|v|z alone, in the activations' dtype.
    plain = {p: replace(weight_format.PLAIN, name="as it is", block=1) for p in kept if "in_proj" in p}
    for rank in range(world):
        codes, values = loaded(tmp_path, formats, rank, world), loaded(tmp_path, plain, rank, world)
        for parameter in kept:
            found = dequantize(codes[parameter], codes[f"{parameter}_scale"])
            assert torch.equal(found.bfloat16(), values[parameter]), parameter
        for parameter in values.keys() - kept:
            assert torch.equal(codes[parameter], values[parameter]), parameter


@pytest.mark.parametrize("name", ["gptq-8", "fp8-channel", "nvfp4"])
def test_other_formats_are_dequantised(tmp_path: Path, name: str) -> None:
    packer, config = FORMATS[name]
    write_checkpoint(tmp_path, **SIZES)
    quantise(tmp_path, every_linear(packer), config)
    assert not any(
        form.group for form in read_formats(read_model_config(tmp_path), tmp_path, CPU, None).values()
    )


def test_float32_activations_and_scales_have_values(tmp_path: Path) -> None:
    packer, config = FORMATS["gptq"]
    write_checkpoint(tmp_path, **SIZES)
    quantise(tmp_path, every_linear(packer), config)
    assert not read_formats(read_model_config(tmp_path), tmp_path, CPU, None, torch.float32)
