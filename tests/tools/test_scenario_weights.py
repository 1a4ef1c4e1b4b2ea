"""The tool that times new weights and sleep: one line, or no output for tokens that change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from compiled_mtp.engine import Engine
from tests.checkpoints import write_checkpoint

TOOL = "engine_scenarios.weights"
FLAGS = ["weights", "--device=cpu", "--compile=off", "--num-threads=1", "--repeats=1", "--max-model-len=256"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("weights") / "small")


def test_the_line_has_the_times(
    bench_engine: Any, capsys: pytest.CaptureFixture[str], checkpoint: Path
) -> None:
    bench_engine.main([*FLAGS, f"--model={checkpoint}"])
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (line["model"], line["device"], line["is_compiled"]) == ("small", "cpu", False)
    assert min(line["update_s"], line["sleep_s"], line["wake_up_s"], line["start_s"]) >= 0
    assert (line["held_gib"], line["asleep_gib"], line["update_peak_mib"]) == (None, None, None)


@pytest.mark.parametrize(
    ("name", "text"), [("update_weights", "an update by the same weights"), ("wake_up", "a wake-up")]
)
def test_nothing_is_printed_for_tokens_that_change(
    bench_engine: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    checkpoint: Path,
    name: str,
    text: str,
) -> None:
    change = getattr(Engine, name)

    def damaging(engine: Engine, *given: Any) -> None:
        change(engine, *given)
        for parameter in engine.runner.step.target.parameters():
            if parameter.dim() == 1:
                parameter.data.neg_()

    monkeypatch.setattr(Engine, name, damaging)
    with pytest.raises(SystemExit, match=f"error: tokens differ after {text}"):
        bench_engine.main([*FLAGS, f"--model={checkpoint}"])
    assert capsys.readouterr().out == ""


def test_a_shape_has_no_files(bench_engine: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="error: weights need --model"):
        bench_engine.main([*FLAGS, "--shape=tiny"])
    assert capsys.readouterr().out == ""
