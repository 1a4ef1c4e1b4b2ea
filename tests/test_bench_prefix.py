"""tools/bench_prefix.py: the line that it prints, and when it prints none."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "tools"))
    sizes = ["--prompt-tokens=130", "--max-tokens=3", "--repeats=1", "--device=cpu", "--num-threads=1"]
    monkeypatch.setattr(sys, "argv", ["bench_prefix", *sizes, "--compile=off"])
    return importlib.import_module("bench_prefix")


def test_what_comes_again_is_cached(tool: Any, capsys: pytest.CaptureFixture[str]) -> None:
    tool.main()
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["cached_tokens"] == 128
    assert line["first_token_s"].keys() >= {"new", "without_cache", "again"}


def test_nothing_is_printed_for_tokens_that_depend_on_the_cache(
    tool: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tool.run

    def wrong(*given: Any) -> Any:
        timed = run(*given)
        return timed._replace(token_ids=[-1, *timed.token_ids[1:]]) if timed.cached_tokens else timed

    monkeypatch.setattr(tool, "run", wrong)
    with pytest.raises(SystemExit, match="tokens or rounds depend on the cache at prompt 0"):
        tool.main()
    assert capsys.readouterr().out == ""


def test_a_prompt_without_a_place_to_resume_at_is_named(
    tool: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--prompt-tokens=60"])
    with pytest.raises(SystemExit, match="was not found in the cache; raise --prompt-tokens"):
        tool.main()
    assert capsys.readouterr().out == ""
