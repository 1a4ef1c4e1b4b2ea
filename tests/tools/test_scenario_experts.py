"""The tool that times recorded experts: one line, or no output for tokens that they change."""

from __future__ import annotations

import json
from typing import Any

import pytest

TOOL = "engine_scenarios.experts"
FLAGS = ["experts", "--shape=tiny-moe", "--num-threads=1", "--device=cpu", "--batch=1,2", "--tokens=8"]
SIZES = ["--context=16", "--repeats=1"]


def test_the_line_has_a_row_for_each_batch(bench_engine: Any, capsys: pytest.CaptureFixture[str]) -> None:
    bench_engine.main(FLAGS + SIZES)
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (line["shape"], line["device"], line["tokens"]) == ("tiny-moe", "cpu", 8)
    assert [row["batch"] for row in line["rows"]] == [1, 2]
    for row in line["rows"]:
        assert min(row["off_ms"], row["on_ms"], row["off_again_ms"], row["read_ms"]) > 0
        assert row["off_over_off"] >= 1


def test_nothing_is_printed_for_tokens_that_change(
    tool: Any, bench_engine: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = tool.decode

    def wrong(engine: Any, prompts: Any, params: Any) -> Any:
        tokens, *times = decode(engine, prompts, params)
        return ([[0, *one] for one in tokens] if params.return_routed_experts else tokens), *times

    monkeypatch.setattr(tool, "decode", wrong)
    with pytest.raises(SystemExit, match="error: recorded experts change tokens"):
        bench_engine.main(FLAGS + SIZES)
    assert capsys.readouterr().out == ""


def test_a_model_without_experts_is_named(bench_engine: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="error: the shape must have experts, got tiny"):
        bench_engine.main([*FLAGS, "--shape=tiny", *SIZES])
    assert capsys.readouterr().out == ""
