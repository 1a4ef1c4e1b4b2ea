"""Where a step's time goes, as bench_step and bench_ranks tell it."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

TOOLS = Path(__file__).parents[1] / "tools"


def event(name: str, start: float, end: float, device: str = "DeviceType.CUDA") -> Any:
    return SimpleNamespace(
        name=name, device_type=device, time_range=SimpleNamespace(start=start, end=end, elapsed_us=None)
    )


def test_a_kernel_that_waits_for_another_counts_from_its_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    tool = importlib.import_module("bench_step")
    events = [
        event("launch", 0.0, 90.0, "DeviceType.CPU"),
        event("product", 10.0, 30.0),
        # Launched early, it waits until 30.
        event("norm", 12.0, 33.0),
        event("product", 33.0, 50.0),
        event("norm", 34.0, 55.0),
    ]
    spans = tool.own_spans(reversed(events))
    assert spans == [("product", 20.0), ("norm", 3.0), ("product", 17.0), ("norm", 5.0)]
    tool.print_kernels(spans, steps=2)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1:] == [["1", "18.5", "18.50", "product"], ["1", "4.0", "4.00", "norm"]]
