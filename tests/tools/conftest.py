"""The tools import each other by name, from their folder."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture(autouse=True)
def tools_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))


@pytest.fixture
def tool(request: pytest.FixtureRequest, tools_path: None) -> Any:
    """The module that a test file names as TOOL."""
    return importlib.import_module(request.module.TOOL)


@pytest.fixture
def bench_engine(tools_path: None) -> Any:
    return importlib.import_module("bench_engine")
