"""Loading to a GPU: the weights have the bits that a CPU's loader gives them, packed and multiplied out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type

from compiled_mtp.models.hf_config import read_model_config
from compiled_mtp.models.weight_format import Formats, resolve_recipe
from compiled_mtp.models.weights import load_weights, read_formats
from tests.checkpoints import allocate, write_checkpoint
from tests.gguf.test_tensors import SHAPES
from tests.gguf_files import write_gguf
from tests.models.test_quantised import FORMATS, every_linear
from tests.models.test_scaled_codes import SIZES, medium
from tests.quantised import quantise

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")
TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4", "BF16", "F16")


def check_same(path: Path, formats: Formats) -> None:
    """Load the checkpoint to both devices and compare all parameters bit by bit."""
    config = read_model_config(path)
    both: list[dict[str, Any]] = []
    for device in ("cpu", GPU):
        parameters = allocate(config, True, torch.bfloat16, formats)
        parameters = {name: parameter.data.to(device) for name, parameter in parameters.items()}
        load_weights(config, path, parameters, with_mtp=True, formats=formats, is_checked=True)
        both.append(parameters)
    for name, wanted in both[0].items():
        got = both[1][name].cpu()
        assert got.dtype == wanted.dtype
        assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8)), name


def check_all(path: Path) -> None:
    config = read_model_config(path)
    recipe = resolve_recipe("auto", has_fp8=config.quantized, device=GPU)
    check_same(path, {})
    if formats := read_formats(config, path, GPU, recipe):
        check_same(path, formats)


@pytest.mark.parametrize("name", FORMATS)
def test_quantised_weights(tmp_path: Path, name: str) -> None:
    packer, config = FORMATS[name]
    write_checkpoint(tmp_path / "model", **SIZES)
    quantise(tmp_path / "model", every_linear(packer), config)
    check_all(tmp_path / "model")


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "qwen3_next"])
def test_plain_weights(tmp_path: Path, family: str) -> None:
    check_all(write_checkpoint(tmp_path / "model", family, num_value_heads=4, num_key_heads=2))


@pytest.mark.parametrize("kind", TYPES)
def test_gguf_types(tmp_path: Path, kind: str) -> None:
    source = write_checkpoint(tmp_path / "source", **(SHAPES["dense-r3"] | SIZES))
    check_all(write_gguf(source, tmp_path / "model.gguf", lambda _: Type[kind]))


@pytest.mark.parametrize("name", ["next", "moe"])
def test_gguf_mixtures(tmp_path: Path, name: str) -> None:
    sizes = SIZES | {"moe_intermediate_size": 256, "num_experts": 4}
    source = write_checkpoint(tmp_path / "source", **(sizes | SHAPES[name]))
    check_all(write_gguf(source, tmp_path / "model.gguf", medium))
