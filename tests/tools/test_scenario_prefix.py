"""The scenario prefix: the line that it prints, and when it prints none."""

from __future__ import annotations

import json
from typing import Any

import pytest

TOOL = "engine_scenarios.prefix"
FLAGS = ["prefix", "--prompt-tokens=130", "--max-tokens=3", "--repeats=1", "--device=cpu", "--num-threads=1"]
FLAGS += ["--compile=off"]


def test_a_repeated_prompt_is_cached(bench_engine: Any, capsys: pytest.CaptureFixture[str]) -> None:
    bench_engine.main(FLAGS)
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["cached_tokens"] == 128
    assert line["first_token_s"].keys() >= {"new", "without_cache", "again"}


def test_nothing_is_printed_for_tokens_that_depend_on_the_cache(
    tool: Any, bench_engine: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tool.decode

    def wrong(*given: Any) -> Any:
        timed = run(*given)
        return timed._replace(token_ids=[-1, *timed.token_ids[1:]]) if timed.cached_tokens else timed

    monkeypatch.setattr(tool, "decode", wrong)
    with pytest.raises(SystemExit, match="tokens or rounds depend on the cache at prompt 0"):
        bench_engine.main(FLAGS)
    assert capsys.readouterr().out == ""


def test_a_prompt_without_a_resume_point_is_named(
    bench_engine: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="was not found in the cache; raise --prompt-tokens"):
        bench_engine.main([*FLAGS, "--prompt-tokens=60"])
    assert capsys.readouterr().out == ""
