"""A checkpoint with weights that are not finite is refused, by the name of the tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compiled_mtp.models.finite import find_not_finite
from tests.checkpoints import write_checkpoint
from tests.engines import make_engine


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_element_is_enough(value: float, dtype: torch.dtype) -> None:
    weights = {"a": torch.randn(5, 7).to(dtype), "b": torch.full((300, 300), 3e38, dtype=dtype)}
    weights |= {"c": torch.zeros(0, 4), "d": -weights["b"]}
    assert find_not_finite(weights) == []
    weights["b"][299, 298] = value
    assert find_not_finite(weights) == ["b"]


def test_fp8_and_several() -> None:
    kept = torch.full((8, 8), -448.0).to(torch.float8_e4m3fn)
    assert find_not_finite({"kept": kept}) == []
    broken = {name: kept.clone() for name in "abcde"}
    for tensor in broken.values():
        tensor.view(torch.uint8)[3, 4] = 0xFF
    assert find_not_finite(broken) == [*"abcde"]


@pytest.mark.parametrize(
    ("options", "broken"),
    [
        # Parts of one parameter; a convolution; a tensor of the MTP head.
        ({}, ["layers.2.mlp.up_proj.weight"]),
        ({}, ["layers.0.linear_attn.in_proj_z.weight", "layers.1.linear_attn.conv1d.weight"]),
        ({}, ["mtp.fc.weight"]),
        ({"family": "qwen3_5_moe"}, ["layers.1.mlp.experts.gate_up_proj"]),
        ({"family": "qwen3_next", "num_value_heads": 1}, ["layers.1.mlp.experts.5.up_proj.weight"]),
        # Scales that a CPU multiplies into the weight, and that weight.
        ({"fp8_scale": torch.bfloat16}, ["layers.2.mlp.up_proj.weight_scale_inv"]),
        ({"fp8_scale": torch.bfloat16}, ["layers.2.mlp.up_proj.weight"]),
    ],
)
def test_an_engine_names_the_tensors_of_the_file(
    tmp_path: Path, options: dict[str, Any], broken: list[str]
) -> None:
    write_checkpoint(tmp_path, **options)
    (file,) = tmp_path.glob("*.safetensors")
    tensors = load_file(file)
    names = [next(name for name in tensors if name.endswith(end)) for end in broken]
    for name in names:
        tensors[name].view(-1)[-1:] = torch.tensor([float("nan")]).to(tensors[name].dtype)
    save_file(tensors, file)
    with pytest.raises(
        ValueError, match=r"^weights must be finite, got NaN or infinity in .*; check"
    ) as error:
        make_engine(tmp_path, check_weights=True)
    told = str(error.value).partition(" infinity in ")[2].partition(";")[0].split(", ")
    assert sorted(told) == sorted(f"{name} ({file.name})" for name in names)
    # On a CPU the engine checks the weights only if check_weights asks for it.
    make_engine(tmp_path)
