"""tools/plot.py: each picture from a few lines of JSON, and the sources of the committed pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools import plot

ROOT = Path(__file__).parents[2]
STEPS = [
    {"shape": "4b", "mtp_step": step, "batch": batch, "tokens_per_s": speed}
    for step, batch, speed in ((0, 1, 100.0), (0, 8, 400.0), (3, 1, 250.0), (3, 8, 600.0), (3, 16, 900.0))
]
CASES = [
    {"case": "code", "batch": b, "tokens_per_s": {"0": 10.0, "3": 10.0 + b, "auto": 20.0}} for b in (1, 2)
]
METRICS = [{"drafted_by_index": [4, 4, 2], "accepted_by_index": [4, 2, 0]}, {"drafted_by_index": [6, 6, 0]}]
METRICS[1]["accepted_by_index"] = [1, 1, 0]
PREFIX = [
    {"prompt_tokens": length, "first_token_s": {"new": length / 1000, "again": 0.1, "goes_on": 0.2}}
    for length in (2048, 512)
]
# A plot's input, and the lines that it draws from it.
CASES_OF: dict[str, list[tuple[list[Any], dict[str, Any]]]] = {
    "speedup": [
        (STEPS, {"it, mtp_step 3": {1: 2.5, 8: 1.5}}),
        (
            [*CASES, {"device": "cpu", "cases": CASES}],
            {"it, code, mtp_step 3": {1: 1.1, 2: 1.2}, "it, code, mtp_step auto": {1: 2.0, 2: 2.0}},
        ),
    ],
    "acceptance": [([{"metrics": one} for one in METRICS], {"it": {1: 0.5, 2: 0.3, 3: 0.0}})],
    "first-token": [
        (
            PREFIX,
            {
                "it, new prompts": {512: 0.512, 2048: 2.048},
                "it, prompts that come again, cached": {512: 0.1, 2048: 0.1},
            },
        )
    ],
}


@pytest.mark.parametrize("name", plot.PLOTS)
def test_a_picture_of_each(name: str, tmp_path: Path) -> None:
    for objects, lines in CASES_OF[name]:
        file = tmp_path / "data.jsonl"
        # Progress and tables may come between a tool's records.
        file.write_text("a table\n" + "\n".join(map(json.dumps, [*objects, {"other": 1}])))
        assert plot.PLOTS[name][0]("it", list(plot.read_objects(file))) == lines
        pictures = [tmp_path / "one.svg", tmp_path / "two.svg"]
        for picture in pictures:
            assert plot.main([name, f"it={file}", "--title", "A title", "--output", str(picture)]) == 0
        assert pictures[0].read_bytes() == pictures[1].read_bytes()
        assert pictures[0].read_text().count("<use ") >= sum(map(len, lines.values()))


def test_every_line_of_a_committed_picture_was_measured() -> None:
    files = sorted((ROOT / "docs" / "data").iterdir())
    assert len({file.read_bytes() for file in files}) == len(files) > 0


def test_missing_data_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps(STEPS[0]))
    assert plot.main(["acceptance", f"it={file}", "--output", str(tmp_path / "x.svg")]) == 2
    assert f"error: inputs must hold what acceptance needs, got {file};" in capsys.readouterr().err
    assert plot.main(["speedup", "it=/nowhere", "--output", str(tmp_path / "x.svg")]) == 2
    with pytest.raises(SystemExit):
        plot.main(["speedup", str(file), "--output", str(tmp_path / "x.svg")])
    assert "inputs must be LABEL=FILE, got " in capsys.readouterr().err
    assert not (tmp_path / "x.svg").exists()
