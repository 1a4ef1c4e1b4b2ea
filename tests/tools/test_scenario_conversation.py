"""The conversation through the service: answers are the forced ones, and quotes take fewer rounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

FLAGS = ["conversation", "--shape=tiny", "--num-threads=1", "--device=cpu", "--turns=3", "--rate=2.6"]
FILE = "\n\n".join(f"def {name}(one, other):\n    return {name!r}, one, other\n" for name in ("add", "twice"))


def test_quotes_of_what_was_said_take_fewer_rounds(
    bench_engine: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import engine_scenarios.conversation as scenario

    def git(command: str, *arguments: str) -> str:
        return "2\n1\n" if command == "log" else FILE + arguments[0].partition(":")[0]

    monkeypatch.setattr(scenario, "git", git)
    file = tmp_path / "versions.json"
    bench_engine.main([*FLAGS, f"--save-versions={file}"])
    assert json.loads(file.read_text()) == [FILE + "1", FILE + "2"]
    bench_engine.main([*FLAGS, f"--versions={file}"])
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    off, auto = line["rows"]["off"], line["rows"]["auto"]
    assert len(off) == len(auto) == len(line["speedup"]) == 3
    assert [one["tokens"] for one in off] == [one["tokens"] for one in auto]
    for one, other in zip(auto[1:], off[1:], strict=True):
        assert one["tokens_per_round"] > 2 * other["tokens_per_round"]
    assert not any(one["lookup_accepted"] for one in off)
    with pytest.raises(SystemExit, match="error: 6 turns take 4 versions, got 2"):
        bench_engine.main([*FLAGS, "--turns=6", f"--versions={file}"])
