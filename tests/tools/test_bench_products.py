"""Which weights and tiles bench_products takes."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module("bench_products")


def test_the_named_weights_once_each(tool: Any) -> None:
    cases = tool.wanted_cases(["27b", "4b"], ["down", "o"], ["bf16", "fp8"])
    assert [(case.name, case.n, case.k, case.fp8) for case in cases] == [
        ("o", 5120, 6144, False),
        ("down", 5120, 17408, False),
        ("o", 5120, 6144, True),
        ("down", 5120, 17408, True),
        ("o", 2560, 4096, False),
        ("down", 2560, 9216, False),
        ("o", 2560, 4096, True),
        ("down", 2560, 9216, True),
    ]
    every = [case.name for case in tool.wanted_cases(["27b"], [], ["bf16"])]
    # Attention's output projection has the size of GDN's.
    assert every == ["qkvz|ba", "gdn_out", "q|k|v", "gate|up", "down", "lm_head"]


@pytest.mark.parametrize("rows", [4, 32, 128])
def test_ways_of_a_product_before_a_norm(tool: Any, rows: int) -> None:
    """Every number of programs in use, the table's named once; W8A8 tiles for as many rows."""
    (case,) = tool.wanted_cases(["27b"], ["down"], ["fp8"])
    labels = [way.label for way in case.ways(rows)]
    assert len(set(labels)) == len(labels)
    assert sum(label.startswith("w8a16 x") for label in labels) == 4
    assert sum("table" in label for label in labels) == 1
    assert {way.recipe for way in case.ways(rows)} == {"w8a16", "w8a8"}
