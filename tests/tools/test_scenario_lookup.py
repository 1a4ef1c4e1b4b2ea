"""The tool that times drafts from the text: one line, or no output."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

TOOL = "engine_scenarios.lookup"
FLAGS = ["lookup", "--shape=tiny", "--num-threads=1", "--device=cpu", "--mtp-step=3", "--most-tokens=250"]
NAMES = ("add", "double", "subtract", "multiply")
OLD = "\n\n".join(f"def {name}(one, other):\n    return compute({name!r}, one, other)\n" for name in NAMES)


@pytest.fixture(autouse=True)
def history(bench_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two edits of one file: an sdist has no history."""
    import engine_scenarios.lookup as scenario

    def git(command: str, *arguments: str) -> str:
        if command == "log":
            return ":1\n\nadd.py\n:2\n\nadd.py\n:3\n\nadd.py\n:4\n\nadd.py\n:5\n\nadd.py\n:6\n\nadd.py\n"
        return OLD if "^" in arguments[0] else OLD.replace("double", "twice") + "\n\nprint(double(2))\n"

    monkeypatch.setattr(scenario, "git", git)


def test_edits_take_fewer_rounds_with_lookup(bench_engine: Any, capsys: pytest.CaptureFixture[str]) -> None:
    bench_engine.main([*FLAGS, "--texts=2", "--rates=none,2.6"])
    printed = capsys.readouterr()
    line = json.loads(printed.out.splitlines()[-1])
    assert [json.loads(row) for row in printed.err.splitlines() if row.startswith("{")] == line["rows"]
    assert (line["max_drafts"], line["only_insertions"]) == (15, 0)
    assert {(row["kind"], row["batch"], row["texts"]) for row in line["rows"]} == {("edits", 1, 2)}
    assert line["added_lines"] > line["removed_lines"]
    rows = {(row["chain"], row["lookup"]): row for row in line["rows"]}
    assert rows.keys() == {("none", "auto"), ("2.6", "off"), ("2.6", "auto")}
    assert rows["2.6", "auto"]["rounds"] < rows["2.6", "off"]["rounds"]
    assert rows["2.6", "auto"]["lookup_accepted"] > 0 == rows["2.6", "off"]["lookup_rounds"]


def test_prose_may_use_the_models_own_chain(bench_engine: Any, capsys: pytest.CaptureFixture[str]) -> None:
    bench_engine.main([*FLAGS, "--kind=prose", "--texts=1", "--own-chain", "--most-tokens=40"])
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["chain"] for row in line["rows"]] == ["none", "own", "own"]
    assert all(row["tokens_per_round"] >= 1.0 for row in line["rows"])


def test_one_setting_with_more_slots(bench_engine: Any, capsys: pytest.CaptureFixture[str]) -> None:
    bench_engine.main([*FLAGS, "--texts=1", "--rates=3.7", "--lookup=auto", "--max-batch=9"])
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(row["chain"], row["lookup"]) for row in line["rows"]] == [("3.7", "auto")]
    assert line["max_drafts"] == 15
    with pytest.raises(SystemExit, match="2"):
        bench_engine.main([*FLAGS, "--lookup=on"])
    assert "must name some of off, auto, got 'on'" in capsys.readouterr().err


def test_engines_that_choose_their_depths_may_be_held_at_one(
    bench_engine: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--kind=random", "--texts=2", "--rates=3.7", "--at-depth=1"]
    bench_engine.main([*FLAGS, "--mtp-step=auto", *given])
    off, auto = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert off["rounds"] == auto["rounds"]
    assert 1.5 < off["tokens_per_round"] < 2.0
    with pytest.raises(SystemExit, match="error: --at-depth needs --mtp-step auto, got 3"):
        bench_engine.main([*FLAGS, *given])


def test_nothing_is_printed_for_other_tokens(
    bench_engine: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import engine_scenarios.lookup as scenario

    # Outputs that nothing forces.
    monkeypatch.setattr(scenario, "Admit", SimpleNamespace)
    with pytest.raises(SystemExit, match="error: the output is not the forced one"):
        bench_engine.main([*FLAGS, "--texts=1"])
    assert capsys.readouterr().out == ""


def test_several_texts_at_a_time_decode_a_part_of_each_output(
    bench_engine: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--kind=edits,random", "--texts=2", "--batch=2", "--most-output=40", "--rates=none,2.6"]
    bench_engine.main([*FLAGS, *given])
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["kind"] for row in rows] == ["edits"] * 3 + ["random"] * 3
    found = {(row["kind"], row["chain"], row["lookup"]): row for row in rows}
    assert found["random", "2.6", "off"]["rounds"] == found["random", "2.6", "auto"]["rounds"]
    assert found["random", "none", "auto"]["rounds"] == 2 * 39


def test_edits_are_saved_and_read(
    bench_engine: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import engine_scenarios.lookup as scenario

    file = tmp_path / "edits.jsonl"
    bench_engine.main([*FLAGS, "--texts=2", f"--save-edits={file}"])
    saved = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert saved["edits"] == 2
    # Without a history.
    monkeypatch.setattr(scenario, "git", None)
    bench_engine.main([*FLAGS, "--texts=2", "--rates=2.6", f"--edits={file}"])
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [line[name] for name in ("added_lines", "removed_lines")] == [
        saved[name] for name in ("added_lines", "removed_lines")
    ]
    with pytest.raises(SystemExit, match="error: there are 2 such edits; lower --texts"):
        bench_engine.main([*FLAGS, "--texts=3", f"--edits={file}"])
