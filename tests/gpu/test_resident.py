"""Products whose resident weights load before the previous kernel ends: their bits, and the contract."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_mtp.models.layers import RMSNorm
from compiled_mtp.models.linear import Linear
from compiled_mtp.ops.linear import kernel, resident_config
from compiled_mtp.ops.linear.resident_config import read_resident_table
from compiled_mtp.ops.linear.resident_kernel import launch_resident
from tests.checkpoints import write_checkpoint
from tests.gpu.test_engine import decode_mixed, gpu_engine, plain_streams

pytestmark = pytest.mark.gpu


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The tiles that are launched."""
    tiles: list[Any] = []

    def launch(tile: Any, *rest: Any) -> torch.Tensor:
        tiles.append(tile)
        return launch_resident(tile, *rest)

    monkeypatch.setattr(kernel, "launch_resident", launch)
    return tiles


@pytest.mark.parametrize("name", read_resident_table())
def test_resident_products_have_the_bits_of_the_others(
    name: str, launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 to 16 rows between other rows; NaN comes after the last row."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "tools"))
    multiply = importlib.import_module("op_cases.linear").multiply
    size, kind = name.split()
    n, k = map(int, size.split("x"))
    weight = (torch.randn(n, k, device="cuda") / 32).bfloat16()
    for rows in (1, 2, 3, 4, 7, 8, 9, 13, 16):
        wide = torch.full((rows + 3, k + 64), float("nan"), dtype=torch.bfloat16, device="cuda")
        x = wide[:rows, :k]
        x.copy_(torch.randn(rows, k))
        before = len(launched)
        wanted = multiply(x, weight, kind)
        assert len(launched) == before
        got = multiply(x, weight, kind, resident=True)
        assert len(launched) == before + 1
        assert torch.equal(got, wanted)
        # The same rows among more than 16, with which no weight is resident.
        many = torch.cat((x, torch.randn(20, k, device="cuda").bfloat16()))
        assert torch.equal(multiply(many, weight, kind, resident=True)[..., :rows, :], wanted)
    assert len(launched) == before + 1


class Everything(dict[str, list[int]]):
    """A table in which every product has a tile."""

    def get(self, name: str, default: Any = None) -> Any:
        return [32, 64, 1]


@pytest.mark.parametrize("compile", ["off", "auto"])
def test_same_tokens_with_every_weight_resident(
    compile: str, launched: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Few fences are left: the embedding, fc and the head. Depths 0 to 3, one request and mixed ones."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_q_heads": 4}
    directory = write_checkpoint(tmp_path / "model", num_layers=8, num_value_heads=4, **sizes)
    expected = plain_streams(directory, "bfloat16", "off")
    assert not launched
    monkeypatch.setattr(resident_config, "read_resident_table", Everything)
    for mtp_step, batch in ((0, 1), (0, 8), (3, 1), (3, 3), (3, 8), (2, 5)):
        if compile == "auto" and (mtp_step, batch) not in ((3, 1), (3, 8)):
            continue
        before = len(launched)
        # FP8 weights are never resident.
        given = {"dtype": "bfloat16", "draft_dtype": "weights", "compile": compile, "max_batch": batch}
        engine = gpu_engine(directory, mtp_step=mtp_step, **given)
        step = engine.runner.step
        modules = [*step.target.modules(), *(step.draft.modules() if step.draft is not None else ())]
        resident = [module for module in modules if isinstance(module, Linear) and module.resident]
        assert len(resident) > 16
        assert step.draft is None or not step.draft.fc.resident
        assert all(module.resident for module in modules if isinstance(module, RMSNorm))
        # Graphs are captured when the engine is created.
        assert len(launched) >= before + len(resident)
        for seed in range(3):
            assert decode_mixed(engine, seed, batch) == expected
        engine.close()
