"""A mistake in a tool's flags ends it with one line that names the flag, and with code 2."""

from __future__ import annotations

import importlib
import sys

import pytest

COMMANDS = [
    ("bench_engine", ["nope"], "argument scenario: invalid choice: 'nope'"),
    ("bench_engine", ["serving", "--max-batch=0"], "argument --max-batch: must be an integer from 1 on"),
    ("bench_load", [], "the following arguments are required: --directory"),
    ("bench_load", ["--directory=x", "--format=int5"], "argument --format: must be of bf16, "),
    ("bench_op", ["--op=linear", "--rows=4,x"], "argument --rows: must be an integer from 1 on, got 'x'"),
    ("bench_op", ["--op=lineal"], "argument --op: must be of "),
    ("bench_op", ["--op=linear", "--set=x"], "argument --set: must be NAME=INTEGER, got 'x'"),
    ("bench_transformers", [], "the following arguments are required: --prompt-file"),
    ("compare_recipes", ["--nope"], "unrecognized arguments: --nope"),
    ("page_screenshot", ["--nope"], "unrecognized arguments: --nope"),
    ("plot", ["speedup"], "the following arguments are required: LABEL=FILE, --output"),
    ("tune_products", ["w8a8", "--rows=0"], "argument --rows: must be an integer from 1 on, got '0'"),
    ("tune_products", ["narrow", "--shapes=5b"], "argument --shapes: must be of 0.8b, "),
]


@pytest.mark.parametrize(("tool", "flags", "says"), COMMANDS)
def test_a_mistake_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tool: str,
    flags: list[str],
    says: str,
) -> None:
    monkeypatch.setattr(sys, "argv", [f"tools/{tool}.py", *flags])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(tool).main()
    (line,) = capsys.readouterr().err.splitlines()
    assert (ended.value.code, line.startswith(f"error: {says}")) == (2, True), line
