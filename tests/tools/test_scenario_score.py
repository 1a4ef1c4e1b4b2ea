"""The tool that times scores: one line, or no output."""

from __future__ import annotations

import json
from typing import Any

import pytest

from compiled_mtp.engine import Engine

TOOL = "engine_scenarios.score"
FLAGS = ["score", "--shape=tiny", "--num-threads=1", "--device=cpu", "--batch=1,2", "--mtp-step=3"]
SIZES = ["--context=16", "--tokens=9", "--repeats=1"]


def test_the_line_has_a_row_for_each_batch(bench_engine: Any, capsys: pytest.CaptureFixture[str]) -> None:
    bench_engine.main(FLAGS + SIZES)
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (line["shape"], line["device"], line["tokens"]) == ("tiny", "cpu", 9)
    assert [row["batch"] for row in line["rows"]] == [1, 2]
    for row in line["rows"]:
        assert min(row[f"{name}_tokens_per_s"] for name in ("score", "prefill", "decode")) > 0


def test_nothing_is_printed_for_scores_that_differ(
    bench_engine: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Engine.score

    def shifted(engine: Engine, prompts: Any, continuations: Any, params: Any) -> Any:
        return plain(engine, prompts, [one[::-1] for one in continuations], params)

    monkeypatch.setattr(Engine, "score", shifted)
    with pytest.raises(SystemExit, match="error: a score differs from decoding's log probability"):
        bench_engine.main(FLAGS + SIZES)
    assert capsys.readouterr().out == ""
