"""`compiled-mtp bench`: its two benchmarks, their flags, and what is missing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from compiled_mtp.cli.main import main
from compiled_mtp.frontend.tokenizer import Tokenizer
from tests.server.serving import ScriptedEngine, make_family, running


@pytest.mark.parametrize("name", ["serving", "step"])
def test_each_benchmark_lists_its_flags(capsys: pytest.CaptureFixture[str], name: str) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["bench", name, "--help"])
    assert exit_.value.code == 0
    printed = capsys.readouterr().out
    assert f"usage: compiled-mtp bench {name}" in printed
    assert {"serving": "--concurrency", "step": "--shape"}[name] in printed


def test_load_on_a_service(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_family(tmp_path / "m", "xml")
    engine = ScriptedEngine(Tokenizer(model))
    engine.say("one two three")
    with running(engine, model) as server:
        # More requests than there are default prompts.
        assert main(["bench", "serving", "--url", server.url, "--num-requests", "7"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["requests"], found["failed"]) == (7, 0)
    assert len({tuple(ids) for ids, _ in engine.seen}) == 6


def test_without_httpx_the_extra_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    monkeypatch.delitem(sys.modules, "compiled_mtp.benchmarks.service_load", raising=False)
    assert main(["bench", "serving"]) == 2
    assert "bench serving needs the package httpx, got none; pip install" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing without a GPU")
def test_a_step_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "step", "--shape", "4b"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: machine must have a CUDA device for each rank, got 0 for 1; use another")


def test_saved_rows_that_cannot_be_read_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "step", "--shape", "4b", "--beside", "no-such-file"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: beside must be a file of JSON lines, got no-such-file: ")
    assert line.endswith("; check the path")
