"""Saved rows: what another engine measured on the same machine stands beside ours, or is refused by name."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).parents[2] / "tools"
ROW = {
    "engine": "vLLM 0.26.0",
    "device": "NVIDIA H200",
    "shape": "27b",
    "weights": "bf16",
    "mtp_step": 3,
    "batch": 8,
    "context": 512,
    "step_ms": 20.0,
}


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module("saved_rows")


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_rows_of_the_same_case_stand_beside_ours(tool: Any, tmp_path: Path) -> None:
    others = [
        ROW | {name: value}
        for name, value in (
            ("device", "NVIDIA H100"),
            ("shape", "4b"),
            ("weights", "fp8"),
            ("mtp_step", 0),
            ("batch", 1),
            ("context", 32768),
        )
    ]
    older = ROW | {"engine": "compiled-mtp", "step_ms": 16}
    path = write(tmp_path / "rows", *others, ROW, older, ROW | {"step_ms": 22.0, "note": "again"})
    ours = ROW | {"engine": "compiled-mtp", "step_ms": 17.6, "gpu_ms": 17.5}
    beside = tool.rows_beside(tool.read_rows(path), ours)
    assert beside == {"vLLM 0.26.0": [20.0, 22.0], "compiled-mtp": [16.0]}
    assert tool.describe_beside(beside, 17.6) == (
        "vLLM 0.26.0 20.000 to 22.000 ms (1.14 to 1.25 of ours), compiled-mtp 16.000 ms (0.91 of ours)"
    )
    assert tool.describe_beside(tool.rows_beside([], ours), 17.6) == ""


def test_a_table_of_ours_is_a_file_of_rows(tool: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_text(f"27b: read bandwidth 4.6 TB/s\nS=3 replay B=8\n{json.dumps(ROW)}\n")
    assert tool.read_rows(path) == [ROW]
    # As editors write it; a row that is passed over would stand beside nothing, without a word.
    noted = json.dumps(ROW | {"note": "a\u2028b"}, ensure_ascii=False)
    path.write_text(f"\ufeff{json.dumps(ROW)}\n  {noted}\n")
    assert len(tool.read_rows(path)) == 2
    path.write_text("27b: read bandwidth 4.6 TB/s\n")
    with pytest.raises(ValueError, match="must hold a row, got none"):
        tool.read_rows(path)


@pytest.mark.parametrize("layers, beside", [(None, {"vLLM 0.26.0": [20.0]}), (4, {})])
def test_bench_step_prints_such_rows(tool: Any, layers: int | None, beside: dict[str, Any]) -> None:
    arguments = argparse.Namespace(shape="27b", layers=layers, fp8=None, context=512)
    case = importlib.import_module("bench_step").case_of(arguments, 3, "NVIDIA H200")
    row = tool.check_row(case | {"batch": 8, "step_ms": 17.5, "new_tokens_per_round": 2.6})
    assert tool.rows_beside([tool.check_row(ROW)], row) == beside


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("engine", None, "engine must be text, got nothing"),
        ("weights", "w8a8", "weights must be one of bf16, fp8, got 'w8a8'"),
        ("batch", "8", "batch must be an integer from 0 on, got '8'"),
        ("step_ms", 0, "step_ms must be a number above 0, got 0"),
        ("new_tokens_per_round", "2.6", "new_tokens_per_round must be a number above 0, got '2.6'"),
    ],
)
def test_a_row_that_is_none_is_refused(
    tool: Any, tmp_path: Path, name: str, value: Any, message: str
) -> None:
    bad = {key: item for key, item in (ROW | {name: value}).items() if item is not None}
    with pytest.raises(ValueError, match=f"line 2: {message}; tools/saved_rows.py lists the fields"):
        tool.read_rows(write(tmp_path / "rows", ROW, bad))
    (tmp_path / "torn").write_text('{"engine": "vLLM\n')
    with pytest.raises(ValueError, match="torn, line 1: "):
        tool.read_rows(tmp_path / "torn")
