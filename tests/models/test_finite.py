"""A checkpoint whose weights are not numbers is refused, by the name of the tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from compiled_mtp.models.finite import check_finite
from tests.checkpoints import write_checkpoint
from tests.engines import make_engine


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_element_is_enough(value: float, dtype: torch.dtype) -> None:
    weights = {"a": torch.randn(5, 7).to(dtype), "b": torch.full((300, 300), 3e38, dtype=dtype)}
    weights |= {"c": torch.zeros(0, 4), "d": -weights["b"]}
    check_finite(weights)
    weights["b"][299, 298] = value
    with pytest.raises(ValueError, match=r"^weights must be finite, got NaN or infinity in b; check the"):
        check_finite(weights)


def test_fp8_and_several() -> None:
    kept = torch.full((8, 8), -448.0).to(torch.float8_e4m3fn)
    check_finite({"kept": kept})
    broken = {name: kept.clone() for name in "abcde"}
    for tensor in broken.values():
        tensor.view(torch.uint8)[3, 4] = 0xFF
    with pytest.raises(ValueError, match="in a, b, c and 2 more; check"):
        check_finite(broken)


def test_an_engine_names_the_tensor(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("layers.2.mlp.down_proj.weight"))
    tensors[name][1, 2] = float("nan")
    save_file(tensors, file)
    with pytest.raises(ValueError, match=r"infinity in layers\.2\.ffn\.down"):
        make_engine(tmp_path, check_weights=True)
    # On a CPU nobody looks unless told to.
    make_engine(tmp_path)
