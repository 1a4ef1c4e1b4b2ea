"""The tool that loads an engine with many streams: a row of each load, or no output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from compiled_mtp.benchmarks.serving_rows import SAVED_FIELDS
from compiled_mtp.engine import Engine

FLAGS = ["serving", "--shape=tiny", "--num-threads=1", "--device=cpu", "--streams=2,4", "--lengths=9:12,30:6"]


def test_each_load_has_a_row_whose_parts_are_its_seconds(
    bench_engine: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    bench_engine.main([*FLAGS, "--requests=8", "--mtp-step=auto"])
    *lines, last = capsys.readouterr().out.splitlines()
    rows = json.loads(last)["rows"]
    assert [json.loads(line) for line in lines] == rows
    cases = [(row["mean_prompt"], row["streams"], row["requests"]) for row in rows]
    assert cases == [(9, 2, 8), (9, 4, 8), (30, 2, 8), (30, 4, 8)]
    for row in rows:
        parts = row["parts"]
        spent = parts["rounds_s"] + parts["prompts_s"] + parts["idle_s"]
        assert spent == pytest.approx(row["seconds"], abs=0.05)
        assert 1 < parts["requests_per_round"] <= row["streams"]
        assert 0 < row["ttft_ms"]["p50"] <= row["ttft_ms"]["p99"]
        assert row["tpot_ms"]["p50"] > 0
    # Outputs have the drawn lengths, whatever the number of streams.
    assert rows[0]["output_tokens"] == rows[1]["output_tokens"]
    saved = tmp_path / "rows.jsonl"
    others = [rows[0] | {"engine": "another", "tokens_per_s": 1000}]
    others.append({name: others[0][name] for name in SAVED_FIELDS} | {"engine": "a third", "tokens_per_s": 2})
    saved.write_text("\n".join(map(json.dumps, others)))
    bench_engine.main([*FLAGS, "--requests=8", f"--beside={saved}"])
    line, first, second, *_ = capsys.readouterr().out.splitlines()
    assert line.startswith("beside: another 1000 tokens/s (")
    assert f"another: first token {rows[0]['ttft_ms']['p50']:.1f} (p99 " in line
    percentiles = {name: rows[0][name] for name in ("ttft_ms", "tpot_ms")}
    assert json.loads(first)["beside"] == [
        {"engine": "another", "tokens_per_s": 1000, **percentiles},
        {"engine": "a third", "tokens_per_s": 2},
    ]
    assert json.loads(second)["beside"] == []


def test_nothing_is_printed_for_tokens_that_depend_on_the_batch(
    bench_engine: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Engine.generate

    def shifted(engine: Engine, prompts: Any, params: Any) -> Any:
        found = plain(engine, prompts, params)
        for one in found:
            one.new_token_ids.append(len(prompts))
        return found

    monkeypatch.setattr(Engine, "generate", shifted)
    with pytest.raises(SystemExit, match="error: tokens depend on the batch"):
        bench_engine.main(FLAGS)
    assert capsys.readouterr().out == ""
