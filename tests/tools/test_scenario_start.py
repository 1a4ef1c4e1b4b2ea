"""The tool that times a start: its row, and how it counts kernels."""

from __future__ import annotations

import importlib
import json
from types import SimpleNamespace
from typing import Any

import pytest

TOOL = "engine_scenarios.start"


def test_a_start_has_a_row(bench_engine: Any, capsys: pytest.CaptureFixture[str]) -> None:
    bench_engine.main(
        ["start", "--shape=tiny", "--num-threads=1", "--device=cpu", "--compile=off", "--max-batch=2"]
    )
    row = json.loads(capsys.readouterr().out)
    assert (row["shape"], row["mtp_step"], row["max_batch"]) == ("tiny", "auto", 2)
    assert row["start_s"] > 0 < row["first_request_s"]
    # Nothing is compiled or captured.
    assert (row["programs"], row["captures_s"]) == (0, 0)


def test_kernels_are_counted_by_name_and_stage(tools_path: None) -> None:
    kernels = importlib.import_module(TOOL).Kernels()

    def compile_kernel(name: str, *, cache_hit: bool) -> None:
        times = SimpleNamespace(total=3_000_000, lowering_stages=[("ttir", 1_000_000), ("cubin", 500_000)])
        kernels(src=SimpleNamespace(name=name), metadata={}, times=times, cache_hit=cache_hit)

    for name, is_found in (("a", False), ("a", False), ("b", False), ("b", True)):
        compile_kernel(name, cache_hit=is_found)
    assert kernels.row() == {
        "compiled": [3, 9.0],
        "found": 1,
        "stages_s": {"ttir": 3.0, "cubin": 1.5},
        "slowest": {"a": 6.0, "b": 3.0},
    }
