"""The benchmark of depths: every case ends in a record and a plot, and wrong tokens in nothing."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import write_checkpoint

TOOLS = Path(__file__).parents[1] / "tools"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module("bench_depth")


@pytest.fixture
def flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: Any) -> Path:
    """Where the plot goes; the flags are set."""
    write_checkpoint(tmp_path, hidden_size=64, num_value_heads=1, intermediate_size=64)
    monkeypatch.setattr(tool, "CHECKED_TOKENS", 6)
    plot = tmp_path / "depth.png"
    flags = [f"--model={tmp_path}", "--accept=2.6,change", "--depths=0,1", "--fixed=0,1", "--rounds=5"]
    monkeypatch.setattr(sys, "argv", ["bench_depth", *flags, "--seconds=0", "--device=cpu", f"--plot={plot}"])
    return plot


def test_cases_end_in_one_line_and_a_plot(tool: Any, flags: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tool.main()
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["case"] for row in last["cases"]] == ["accept 2.6", "change"]
    for row in last["cases"]:
        assert row["tokens_per_s"].keys() == {"auto", "0", "1"}
        assert min(row["auto_over_best"], row["auto_over_none"]) > 0
        assert sum(row["rounds_by_depth"].values()) >= 5
    assert flags.stat().st_size > 1000


def test_nothing_is_printed_for_tokens_that_depend_on_the_depth(
    tool: Any, flags: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = tool.Bench.decode

    def wrong(self: Any, way: Any, *given: Any) -> Any:
        speed, tokens = decode(self, way, *given)
        return speed, tokens if way.depth == 0 else [[*tokens[0][:-1], -1]]

    monkeypatch.setattr(tool.Bench, "decode", wrong)
    with pytest.raises(AssertionError, match="tokens depend on the depth"):
        tool.main()
    assert capsys.readouterr().out == ""
