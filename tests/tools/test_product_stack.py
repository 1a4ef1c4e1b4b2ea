"""The stack in which tiles compete: which tiles it tries, that it checks them, and which it keeps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compiled_mtp.models.qwen3_5 import TargetModel
from tests import tiny

TOOL = "product_tuning.stack"
SHARED, PROCESSORS = 227 * 1024, 132


def test_tiles_fill_the_processors_and_run_at_once(tool: Any) -> None:
    for n, k, split in ((8224, 1024, 1), (7168, 1024, 1), (1024, 2048, 4), (1024, 3584, 4)):
        found = list(tool.resident_tiles(n, k, split, SHARED, PROCESSORS))
        assert found
        for tile in found:
            programs = -(-n // tile.block_n) * split
            size = 2 * k // split * (tile.block_n + 16)
            assert 99 <= programs <= SHARED // size * PROCESSORS
    assert not list(tool.resident_tiles(34816, 5120, 1, SHARED, PROCESSORS))


def make_tuner(tool: Any, monkeypatch: pytest.MonkeyPatch, times: dict[tuple[int, ...], float]) -> Any:
    """Return a tuner of one product: its stack takes 100 us, with a tile `times`' value for it, or 99.5."""
    target = TargetModel(tiny.tiny_config(), torch.float32, torch.device("cpu"))
    table: dict[str, list[int]] = {}
    name = "1024x2048 parts4"

    def time_us() -> float:
        return times.get(tuple(table[name]), 99.5) if name in table else 100.0

    monkeypatch.setattr(tool, "Stack", lambda shape, rows: SimpleNamespace(target=target, time_us=time_us))
    monkeypatch.setattr(tool, "read_resident_table", lambda: table)
    monkeypatch.setattr(tool.torch.cuda, "current_device", lambda: 0)
    gpu = SimpleNamespace(shared_bytes=SHARED, num_processors=PROCESSORS)
    monkeypatch.setattr(tool, "device_of", lambda index: gpu)
    tuner = tool.ResidentTuner("0.8b", 4)
    tuner.names = {name: (1024, 2048, 4)}
    return tuner


def test_the_fastest_tile_is_kept_only_if_it_gains(tool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "1024x2048 parts4"
    for times, wanted in (({(32, 128, 1): 80.0, (32, 128, 2): 79.9}, [32, 128, 1]), ({}, None)):
        tuner = make_tuner(tool, monkeypatch, times)
        checked: list[list[int]] = []
        monkeypatch.setattr(tuner, "check", lambda name, t=tuner, c=checked: c.append(t.table[name]))
        text = tuner.tune(name, 1e18)
        assert tuner.table.get(name) == wanted
        assert len(checked) > 3
        assert str(wanted) in text


def test_a_tile_that_became_slower_than_none_is_dropped(tool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "1024x2048 parts4"
    slow = {
        tuple(t): 120.0 for t in ([b, p, f] for b in (16, 32, 64) for p in (64, 128, 256) for f in (1, 2, 3))
    }
    for cost, wanted in ((120.0, None), (90.0, [32, 128, 1])):
        tuner = make_tuner(tool, monkeypatch, slow | {(32, 128, 1): cost})
        monkeypatch.setattr(tuner, "check", lambda name: None)
        tuner.table[name] = [32, 128, 1]
        tuner.tune(name, 1e18)
        assert tuner.table.get(name) == wanted


def test_a_tile_with_other_bits_ends_the_run(tool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tuner = make_tuner(tool, monkeypatch, {})
    make = torch.randn
    monkeypatch.setattr(tool.torch, "randn", lambda *size, device: make(*size))
    monkeypatch.setattr(tool, "multiply", lambda x, weight, kind, resident: x + float(resident))
    with pytest.raises(RuntimeError, match=r"1024x2048 parts4: tile \[.*\] has other bits at 1 rows"):
        tuner.tune("1024x2048 parts4", 1e18)
    monkeypatch.setattr(tool, "multiply", lambda x, weight, kind, resident: x)
    tuner.tune("1024x2048 parts4", 1e18)


def test_the_names_are_those_that_a_model_uses(tool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    target = TargetModel(tiny.tiny_config(), torch.float32, torch.device("cpu"))
    monkeypatch.setattr(tool, "Stack", lambda shape, rows: SimpleNamespace(target=target))
    names = tool.ResidentTuner("0.8b", 4).names
    assert any(name.endswith("parts1") for name in names)
    assert any(name.endswith("product") for name in names)
    # `linear` looks up gate and up by that kind.
    gate_up = target.layers[0].ffn.gate_up
    assert gate_up.is_gated
    n, k = gate_up.weight.shape
    assert f"{n}x{k} gated" in names
