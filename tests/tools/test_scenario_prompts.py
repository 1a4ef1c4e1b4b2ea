"""The scenario prompts: the line that it prints."""

from __future__ import annotations

import json
from typing import Any

import pytest

TOOL = "engine_scenarios.prompts"


def test_it_measures_both_ways(bench_engine: Any, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--prompts=3", "--prompt-tokens=5", "--max-batch=4", "--repeats=1"]
    bench_engine.main(["prompts", "--device=cpu", "--compile=off", *sizes])
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (line["shared"]["launches"], line["one_each"]["launches"]) == (1, 3)
    assert 0 < line["shared"]["mean_first_token_s"] <= line["shared"]["last_first_token_s"]
    assert line["times_sooner"] > 0


def test_nothing_is_printed_for_tokens_that_depend_on_their_company(
    tool: Any, bench_engine: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ways: list[int] = []

    def run(engine: object, prompts: object, most: int) -> Any:
        ways.append(most)
        return tool.Timed([7, 8 if most > 1 else 9], [0.1, 0.2], 1)

    monkeypatch.setattr(tool, "prefill", run)
    with pytest.raises(SystemExit, match="first tokens depend on what shares a launch, at turn 0"):
        bench_engine.main(["prompts", "--device=cpu", "--compile=off", "--max-batch=4", "--prompts=2"])
    assert len(ways) == 2
    assert capsys.readouterr().out == ""
