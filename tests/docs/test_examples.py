"""The examples answer a mistake with one line; test_blocks.py and tests/server run them."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from tests.checkpoints import write_checkpoint
from tests.docs.error_texts import ROOT


@pytest.mark.parametrize(
    ("name", "flag", "value", "says"),
    [
        ("stream.py", "--model", "/no/such", "model must be a directory with a config.json, got /no/such"),
        ("batch.py", "--model", "/no/such", "model must be a directory with a config.json, got /no/such"),
        ("evaluate.py", "--model", "/no/such", "model must be a directory with a config.json, got /no/such"),
        ("train.py", "--model", "/no/such", "model must be a directory with a config.json, got /no/such"),
        ("train.py", "--routed-experts", "--steps=1", "routed_experts must be False for a model without exp"),
        ("many_streams.py", "--model", "/no/such", "model must be a directory with a config.json, got /no"),
        # No process listens on port 9.
        ("client.py", "--url", "http://127.0.0.1:9/v1", "Connection error. (--url says where the"),
    ],
)
def test_a_mistake_is_one_line(
    monkeypatch: pytest.MonkeyPatch, name: str, flag: str, value: str, says: str
) -> None:
    monkeypatch.setattr("sys.argv", [name, flag, value])
    with pytest.raises(SystemExit) as error:
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    # Python prints it, and then exits with code 1.
    assert str(error.value).startswith(f"error: {says}")
    assert "\n" not in str(error.value)


def test_a_mixture_of_experts_is_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path, "qwen3_5_moe", tokenizer=True)
    run = runpy.run_path(str(ROOT / "examples" / "train.py"))["main"]
    run(["--model", str(tmp_path), "--routed-experts", "--max-tokens", "3", "--steps", "1"])
    lines = capsys.readouterr().out.splitlines()
    # 14 bytes of "def add(a, b):" or fewer ids, and 3 tokens, the last of which no layer has seen.
    shapes = re.findall(r"\((\d+), (\d+), (\d+)\)", lines[0])
    assert {shape[1:] for shape in shapes} == {("4", "4")}
    assert len(lines) == 1 + len(shapes) == 4


def test_questions_may_come_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text('{"context": "import ", "choices": ["os\\n", ")("], "answer": 0}\n')
    runpy.run_path(str(ROOT / "examples" / "evaluate.py"))["main"](["--file", str(file)])
    assert capsys.readouterr().out.splitlines()[-1] == "1 of 1 right"
