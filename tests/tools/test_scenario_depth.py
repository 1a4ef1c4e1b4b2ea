"""The benchmark of depths: every case ends in a record and a plot; wrong tokens end without output."""

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
    """Return flags for a tiny checkpoint and short blocks."""
    write_checkpoint(tmp_path, hidden_size=64, num_value_heads=1, intermediate_size=64)
    monkeypatch.setattr(tool, "CHECKED_TOKENS", 6)
    flags = ["depth", f"--model={tmp_path}", "--accept=change,2.6", "--depths=0,1", "--max-tokens=24"]
    return [*flags, "--seconds=0", "--graph-mode=uncompiled", "--device=cpu"]


def test_cases_end_in_one_line(
    tool: Any,
    bench_engine: Any,
    flags: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[tuple[Any, ...]] = []
    begin, advance = tool.Bench.begin, tool.Bench.advance
    rounds: list[tuple[str, int]] = []

    def note(self: Any, way: str, prompts: Any, max_tokens: int, rate: Any = None) -> None:
        begun.append((rate, way, prompts))
        begin(self, way, prompts, max_tokens, rate)

    def count(self: Any, way: str, num_tokens: int) -> Any:
        before = self.runner.step_count = 0
        step = self._step

        def counted() -> None:
            self.runner.step_count += 1
            step()

        with monkeypatch.context() as patch:
            patch.setattr(self, "_step", counted)
            found = advance(self, way, num_tokens)
        rounds.append((way, self.runner.step_count - before))
        return found

    monkeypatch.setattr(tool.Bench, "begin", note)
    monkeypatch.setattr(tool.Bench, "advance", count)
    bench_engine.main(flags)
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["case"] for row in last["cases"]] == ["accept change", "accept 2.6"]
    for row in last["cases"]:
        assert row["tokens_per_s"].keys() == {"auto", "0", "1"}
        assert row["turns"] == 1
        for over in (row["auto_over_best"], row["auto_over_none"]):
            low, high = over["interval_95"]
            assert 0 < low <= over["ratio"] <= high
        assert sum(row["rounds_by_depth"].values()) > 0
    # The check's three runs, then each way of a block at its rate, with the same prompts.
    high, low, middle = (tool.rate_for(accept, 3) for accept in (3.3, 1.1, 2.6))
    assert [rate for rate, _, _ in begun[3:]] == [*[high] * 3, *[low] * 3, *[middle] * 6]
    for at in range(3, len(begun), 3):
        assert {way for _, way, _ in begun[at : at + 3]} == {"auto", "0", "1"}
        assert all(prompts == begun[at][2] for _, _, prompts in begun[at : at + 3])
    # Depth 0 takes a round per token; depth 1, at a rate of 2.6, takes fewer rounds.
    steps = dict(rounds[-3:])
    assert steps["1"] < steps["0"]


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
    bench_engine.main([*flags, "--fixed=1", "--max-tokens=8"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()[:-1]]
    assert [(row["case"], row["turns"]) for row in rows] == [("code", 2), ("prose", 2), ("random ids", 2)]
    assert all(row["tokens_per_s"].keys() == {"auto", "1"} for row in rows)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--max-tokens=23", "--max-tokens: must be at least 24, those of a turn, got 23"),
        ("--texts=code,verse", "--texts: must be of code, prose, random ids, got verse"),
        ("--accept=2.6,many", "--accept: must hold mean tokens per round, or change, got 'many'"),
        ("--accept=5", "accept must be from 1 to 4 tokens per round, got 5.0"),
        ("--shape=5b", "invalid choice: '5b'"),
    ],
)
def test_late_errors_are_found_at_once(
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
