"""The benchmark of pools: its counts, and no output for wrong or missing tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import write_checkpoint

TOOL = "engine_scenarios.pressure"
FLAGS = ["pressure", "--requests=3", "--prompt-tokens=8", "--device=cpu", "--num-threads=1"]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPILED_MTP_BLOCK_SIZE", "16")
    # Wide rounds reserve so many blocks that the shortest pool admits one request alone.
    monkeypatch.setenv("COMPILED_MTP_LOOKUP", "off")


@pytest.fixture
def model(tmp_path: Path) -> str:
    write_checkpoint(tmp_path, hidden_size=64, num_value_heads=1, intermediate_size=64)
    return f"--model={tmp_path}"


def test_every_pool_is_timed_and_preemptions_are_counted(
    bench_engine: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    # The shortest pool admits two requests, each with 64 tokens reserved ahead; both cannot end there
    # together.
    lengths = ["--max-tokens=400", "--new-tokens=120"]
    bench_engine.main([*FLAGS, *lengths, "--shape=tiny", "--graph-mode=uncompiled", "--mtp-step=1"])
    line = json.loads(capsys.readouterr().out)
    assert [line[name]["num_blocks"] for name in ("full", "quarter", "half_of_used")] == [78, 19, 12]
    full, short = line["full"], line["half_of_used"]
    assert (full["of_full"], full["offloads"] + full["recomputes"]) == (1, 0)
    assert short["offloads"] + short["recomputes"] > 0
    assert short["of_full"] > 0


def test_nothing_is_printed_for_other_tokens_on_a_short_pool(
    tool: Any,
    bench_engine: Any,
    model: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = tool.decode

    def wrong(engine: Any, options: Any, seed: int) -> Any:
        streams, line = run(engine, options, seed)
        streams[1][-1] ^= engine.runner.memory.num_blocks == 4
        return streams, line

    monkeypatch.setattr(tool, "decode", wrong)
    with pytest.raises(SystemExit, match="tokens on the pool half_of_used differ"):
        bench_engine.main([*FLAGS, model, "--max-tokens=120", "--new-tokens=20"])
    assert not capsys.readouterr().out


def test_nothing_is_printed_where_a_request_ends_too_early(
    bench_engine: Any, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="ended after 20 tokens: length"):
        bench_engine.main([*FLAGS, model, "--max-tokens=20", "--new-tokens=30"])
    assert not capsys.readouterr().out


def test_a_run_of_no_tokens_is_refused(bench_engine: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_engine.main([*FLAGS, "--new-tokens=0"])
    assert "--new-tokens: must be an integer from 1 on, got '0'" in capsys.readouterr().err
