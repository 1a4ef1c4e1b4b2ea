"""The benchmark of depths: every case ends in a record and a plot, and wrong tokens in nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import write_checkpoint

TOOL = "engine_scenarios.depth"


@pytest.fixture
def flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: Any) -> list[str]:
    """Those of a tiny checkpoint, with turns of few rounds."""
    write_checkpoint(tmp_path, hidden_size=64, num_value_heads=1, intermediate_size=64)
    monkeypatch.setattr(tool, "CHECKED_TOKENS", 6)
    for name, value in {"CHANGE_ROUNDS": 8, "AUTO_ROUNDS": 4, "FIXED_ROUNDS": 3, "BLOCK_TURNS": 2}.items():
        monkeypatch.setattr(tool, name, value)
    flags = ["depth", f"--model={tmp_path}", "--accept=change,2.6", "--depths=0,1", "--rounds=24"]
    return [*flags, "--graph-mode=uncompiled", "--device=cpu"]


def test_cases_end_in_one_line(
    tool: Any,
    bench_engine: Any,
    flags: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[tuple[Any, Any]] = []
    advance = tool.Bench.advance

    def note(self: Any, way: str, **given: Any) -> Any:
        made.append((way, given | {"found": advance(self, way, **given)}))
        return made[-1][-1]["found"]

    monkeypatch.setattr(tool.Bench, "advance", note)
    bench_engine.main(flags)
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["case"] for row in last["cases"]] == ["accept change", "accept 2.6"]
    for row in last["cases"]:
        assert row["tokens_per_s"].keys() == {"auto", "0", "1"}
        assert row["turns"] == 6
        for over in (row["auto_over_best"], row["auto_over_none"]):
            low, high = over["interval_95"]
            assert 0 < low <= over["ratio"] <= high
        assert sum(row["rounds_by_depth"].values()) >= 24
    # What is computed of fixed depths is what they give.
    fixed = [(int(way), given) for way, given in made if "rate" in given and way != "auto"]
    rates = [tool.rate_for(accept, 3) for accept in (1.1, 2.6, 3.3)]
    assert {(way, given["rate"]) for way, given in fixed} == {(way, rate) for way in (0, 1) for rate in rates}
    for depth, given in fixed:
        found = given["found"]
        assert found.rounds == 3
        assert tool.rounds_of(depth, given["rate"], found.spans) == found.rounds * len(found.spans)


def test_ways_take_turns_on_the_same_texts(
    tool: Any,
    bench_engine: Any,
    flags: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags = [flag for flag in flags if not flag.startswith("--accept")]
    monkeypatch.setattr(tool, "TURN_TOKENS", 4)
    case = tool.Case("random ids", 1, lambda block: [[block, 2, 3]])
    monkeypatch.setattr(tool, "make_case", lambda name, batch, flags: replace(case, name=name))
    bench_engine.main([*flags, "--fixed=1", "--max-tokens=8", "--seconds=0"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()[:-1]]
    assert [(row["case"], row["turns"]) for row in rows] == [("code", 2), ("prose", 2), ("random ids", 2)]
    assert all(row["tokens_per_s"].keys() == {"auto", "1"} for row in rows)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--max-tokens=23", "--max-tokens: must be at least 24, those of a turn, got 23"),
        ("--texts=code,verse", "--texts: must be of code, prose, random ids, got verse"),
        ("--accept=2.6,many", "--accept: must hold mean tokens a round, or change, got 'many'"),
        ("--accept=5", "accept must be from 1 to 4 tokens a round, got 5.0"),
        ("--shape=5b", "invalid choice: '5b'"),
    ],
)
def test_what_would_be_met_late_is_refused_at_once(
    tool: Any,
    bench_engine: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flag: str,
    message: str,
) -> None:
    monkeypatch.setattr(tool, "run", None)
    with pytest.raises(SystemExit):
        bench_engine.main(["depth", flag])
    assert message in capsys.readouterr().err


def test_a_ratio_counts_every_turn(tool: Any) -> None:
    turns = tool.Turns([24] * 20, {"auto": [1.0] * 18 + [3.0] * 2, "3": [1.0] * 20})
    found = turns.ratio("3")
    assert found["ratio"] == round(20 / 24, 3)
    assert found["median_turn"] == 1.0
    low, high = found["interval_95"]
    assert 0.6 < low < found["ratio"] < high <= 1.0


def test_nothing_is_printed_for_tokens_that_depend_on_the_depth(
    tool: Any,
    bench_engine: Any,
    flags: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    token_ids = tool.Bench.token_ids

    def wrong(self: Any) -> Any:
        first, *others = token_ids(self)
        return [[-1 if self.way == "auto" else first[0], *first[1:]], *others]

    monkeypatch.setattr(tool.Bench, "token_ids", wrong)
    with pytest.raises(SystemExit, match="error: tokens depend on the depth"):
        bench_engine.main(flags)
    assert capsys.readouterr().out == ""
