"""The benchmark of depths: every case ends in a record and a plot, and wrong tokens in nothing."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace
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
    monkeypatch.setattr(tool, "CHANGE_ROUNDS", 8)
    plot = tmp_path / "depth.png"
    flags = [f"--model={tmp_path}", "--accept=change,2.6", "--depths=0,1", "--rounds=24"]
    flags += ["--graph-mode=uncompiled", "--device=cpu", f"--plot={plot}"]
    monkeypatch.setattr(sys, "argv", ["bench_depth", *flags])
    return plot


def test_cases_end_in_one_line_and_a_plot(
    tool: Any, flags: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[Any, Any, Any]] = []
    decode = tool.Bench.decode

    def note(self: Any, way: Any, case: Any, *given: Any) -> Any:
        made.append((way, case, decode(self, way, case, *given)))
        return made[-1][-1]

    monkeypatch.setattr(tool.Bench, "decode", note)
    tool.main()
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["case"] for row in last["cases"]] == ["change", "accept 2.6"]
    for row in last["cases"]:
        assert row["tokens_per_s"].keys() == {"auto", "0", "1"}
        assert min(row["auto_over_best"], row["auto_over_none"]) > 0
        assert sum(row["rounds_by_depth"].values()) >= 24
    assert flags.stat().st_size > 1000
    # What is computed of fixed depths is what they give.
    fixed = [one for one in made if one[1].rates and one[0].depth is not None]
    assert {(way.depth, case.name) for way, case, _ in fixed} == {(0, "change"), (1, "change")}
    for way, case, block in fixed:
        assert (
            tool.tokens_a_round(case, way.depth, block) == sum(e - s for s, e in block.spans) / block.rounds
        )


def test_nothing_is_printed_for_tokens_that_depend_on_the_depth(
    tool: Any, flags: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = tool.Bench.decode

    def wrong(self: Any, way: Any, *given: Any) -> Any:
        block = decode(self, way, *given)
        tokens = [[*block.token_ids[0][:-1], -1 if way.depth is None else block.token_ids[0][-1]]]
        return replace(block, token_ids=tokens)

    monkeypatch.setattr(tool.Bench, "decode", wrong)
    with pytest.raises(AssertionError, match="tokens depend on the depth"):
        tool.main()
    assert capsys.readouterr().out == ""
