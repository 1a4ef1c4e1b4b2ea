"""Flags of the benchmarks: a mistake ends with one line that names it and exit code 2, before any work."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from compiled_mtp.benchmarks import step_time


def error_of(main: Any, words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the last line that a call with these words prints; it must exit with 2."""
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert not captured.out
    return captured.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--op linaer", "must be of "),
        ("--op linear --shape 99b", "'99b'"),
        ("--op linear --rows 4,x", "must be integers from 1 on, separated by commas, got '4,x'"),
        ("--op linear --rows 0", "got '0'"),
        ("--op linear --set prefill", "must be NAME=INTEGER, such as prefill=1, got 'prefill'"),
        ("--op linear --set prefil=1", "set must have names that linear reads: fp8, prefill, got prefil"),
        ("--op moe_experts", "shape must be a mixture of experts, got 27b"),
        ("--op gdn_verify --rows 6", "rows must be a multiple of query_len, got 6 and 4"),
        ("--op linear --set prefill=1 --rows 64", "a CUDA device must be present"),
    ],
)
def test_bench_op(words: str, said: str, capsys: Any, monkeypatch: Any, tools_path: None) -> None:
    tool = importlib.import_module("bench_op")
    monkeypatch.setattr(tool.torch.cuda, "is_available", lambda: False)
    assert said in error_of(tool.main, words.split(), capsys)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--shape 99b", "invalid choice: '99b'"),
        ("--format int5", "must be of bf16, int4, q4_k_m, separated by commas, got 'int5'"),
        ("--decode 1,0", "must be integers from 1 on, separated by commas, got '1,0'"),
        ("--gib 24", "gib must come with a CUDA device, of which it is a part, got 24.0"),
    ],
)
def test_bench_load(
    words: str, said: str, capsys: Any, monkeypatch: Any, tools_path: None, tmp_path: Path
) -> None:
    tool = importlib.import_module("bench_load")
    monkeypatch.setattr(tool.torch.cuda, "is_available", lambda: False)
    given = [*words.split(), "--directory", str(tmp_path)]
    assert said in error_of(tool.main, given, capsys)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--streams 2,4 --requests 1,2,3", "got [1, 2, 3] for [2, 4]"),
        ("--fixed-depths 1 --mtp-step 3", "fixed_depths must come with mtp_step auto, got 3"),
        ("--beside nowhere.jsonl", "nowhere.jsonl"),
    ],
)
def test_bench_engine(words: str, said: str, capsys: Any, bench_engine: Any) -> None:
    assert said in error_of(bench_engine.main, ["serving", "--shape", "tiny", *words.split()], capsys)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--batch 1,x", "must be integers from 1 on, separated by commas, got '1,x'"),
        ("--batch 0", "got '0'"),
        ("--mtp-step auto", "must be integers from 0 on, separated by commas, got 'auto'"),
        ("--graph-mode fast", "must be of replay, reduce-overhead, auto, uncompiled"),
        ("--fp8 --int4", "not allowed with argument"),
    ],
)
def test_bench_step(words: str, said: str, capsys: Any) -> None:
    assert said in error_of(step_time.main, ["--shape", "4b", *words.split()], capsys)


def test_bench_step_says_what_a_case_cannot_have(capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(step_time.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(step_time, "measure_rates", lambda: step_time.Rates(1.0, 1.0, 1.0))
    with pytest.raises(SystemExit) as caught:
        step_time.main(["--shape", "4b", "--mtp-step", "3", "--batch", "1", "--accept", "9"])
    assert caught.value.code == 2
    assert "accept must be from 1 to 4 tokens per round, got 9.0" in capsys.readouterr().err
