"""The benchmark of the service: every way gives the same tokens, and wrong tokens are not timed."""

from __future__ import annotations

import json
from typing import Any

import pytest

TOOL = "engine_scenarios.overhead"
FLAGS = ["overhead", "--shape=tiny", "--streams=2", "--context=5", "--max-tokens=32", "--seconds=0"]
FLAGS += ["--device=cpu", "--num-threads=1"]


@pytest.fixture(autouse=True)
def few_steps(tool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "LEAST_ROUNDS", 3)
    # As on a GPU.
    monkeypatch.setenv("COMPILED_MTP_MAX_IN_FLIGHT", "1")


def test_the_run_ends_in_one_line(bench_engine: Any, capsys: pytest.CaptureFixture[str]) -> None:
    bench_engine.main(FLAGS)
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    (row,) = last["rows"]
    assert (row["streams"], row["turns"], row["tokens"]) == (2, 1, 64)
    assert min(row["throughput_ratio"], row["cpu_ratio"]) > 0
    for times in (row["bare_round_ms"], row["chunk_ms"]):
        assert 0 < times["p50"] <= times["p99"]
    assert row["chunk_over_round"] > 0


def test_nothing_is_printed_for_tokens_that_the_service_changed(
    tool: Any, bench_engine: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = tool.Client.stream

    def wrong(self: Any, bodies: Any) -> Any:
        found = stream(self, bodies)
        found["streams"][0]["token_ids"][-1][-1] ^= 1
        return found

    monkeypatch.setattr(tool.Client, "stream", wrong)
    with pytest.raises(SystemExit, match="other tokens than the engine"):
        bench_engine.main(FLAGS)
    assert capsys.readouterr().out == ""
