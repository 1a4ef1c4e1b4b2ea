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


def test_fixed_depths_repeat_the_first_lengths_on_the_same_engine(
    bench_engine: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    bench_engine.main([*FLAGS, "--requests=3,5", "--mtp-step=auto", "--fixed-depths=2,0"])
    *_, last = capsys.readouterr().out.splitlines()
    rows = json.loads(last)["rows"]
    cases = [(row["mean_prompt"], row["streams"], row["requests"], row["mtp_step"]) for row in rows]
    own = [(9, 2, 3, "auto"), (9, 4, 5, "auto"), (30, 2, 3, "auto"), (30, 4, 5, "auto")]
    assert cases == [*own, (9, 2, 3, 2), (9, 2, 3, 0), (9, 4, 5, 2), (9, 4, 5, 0)]
    for row in rows[4:]:
        assert {shape.rpartition(" ")[2] for shape in row["parts"]["rounds"]} == {str(row["mtp_step"])}


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--requests=1,2,3", "--mtp-step=auto"], "requests must have one number, or one for each"),
        (["--fixed-depths=1", "--mtp-step=3"], "fixed_depths must come with mtp_step auto, got 3"),
    ],
)
def test_flags_that_contradict_each_other_are_named(bench_engine: Any, flags: list[str], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        bench_engine.main([*FLAGS, *flags])


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
