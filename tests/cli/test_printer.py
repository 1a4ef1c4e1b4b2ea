"""Results: where and when they are written, and errors where they cannot be written."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import pytest

from tests.cli.fakes import FakeEngine, Terminal, made, run_main


@pytest.mark.parametrize("is_in_order", [False, True])
def test_results_are_printed_and_written_as_they_end_or_in_order(
    engine: type[FakeEngine],
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    is_in_order: bool,
) -> None:
    output, order = tmp_path / "out.jsonl", [0, 1, 2] if is_in_order else [2, 1, 0]
    flags = [
        "--output",
        output,
        "--max-tokens",
        6,
        "--top-k",
        4,
        "--mtp-step",
        3,
        *(["--in-order"] if is_in_order else []),
    ]
    assert run_main("--prompt-file", prompts, *flags) == 0
    printed = capsys.readouterr()
    texts = ["FIRST ONE", "CHAT..", "A"]
    ends = [
        f"--- 0 ({prompts} line 1): length",
        f"--- 1 chat-7 ({prompts} line 2): length",
        f"--- 2 12 ({prompts} line 3): stop",
    ]
    # A label line before each of several texts names its prompt, wherever standard error goes.
    assert printed.out == "".join(f"{ends[i]}\n{texts[i]}\n" for i in order)
    assert "---" not in printed.err
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["index"] for line in lines] == order
    assert [line["text"] for line in lines] == [texts[i] for i in order]
    lines.sort(key=lambda line: int(line["index"]))
    assert [line["id"] for line in lines] == [None, "chat-7", 12]
    assert lines[2]["token_ids"] == [ord(c) for c in "AB."]
    assert lines[2]["metrics"]["seed"] == 5
    assert lines[2]["metrics"]["output_tokens"] == 3
    assert lines[0]["metrics"]["rounds_by_accepted"] == [0, 0, 2, 0]
    assert (lines[0]["metrics"]["rounds"], lines[0]["metrics"]["accepted_by_index"]) == (2, [2, 2, 0])
    assert [(p.max_tokens, p.top_k, p.temperature) for p in made[0].params] == [
        (9, 4, 1),
        (6, 4, 0.5),
        (6, 4, 1),
    ]


def test_a_line_is_written_while_others_are_decoded(
    engine: type[FakeEngine], prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    output = tmp_path / "out.jsonl"
    monkeypatch.setattr(engine, "before_step", lambda _: seen.append(len(output.read_text().splitlines())))
    assert run_main("--prompt-file", prompts, "--output", output, "--max-tokens", 6) == 0
    assert seen == [0, 1, 2]


def test_a_single_text_and_the_summary_share_no_line(
    engine: type[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = io.StringIO()  # As with 2>&1.
    monkeypatch.setattr("sys.stdout", both)
    monkeypatch.setattr("sys.stderr", both)
    assert run_main("--prompt", "x", "--max-tokens", 6) == 0
    (summary,) = [line for line in both.getvalue().splitlines() if "mtp_step" in line]
    assert summary.split() == ["mtp_step", "auto"]


def test_a_bar_shows_progress(
    engine: type[FakeEngine], prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    assert run_main("--prompt-file", prompts, "--max-tokens", 6) == 0
    shown = terminal.getvalue()
    for done in ("1/3", "2/3", "3/3"):
        assert done in shown
    assert "tokens/s, 5.00 new tokens per round" in shown


def test_each_choice_is_written_separately(engine: type[FakeEngine], tmp_path: Path) -> None:
    """The fake engine gets each request once and answers for every choice, the last one first."""
    prompt, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompt.write_text('{"prompt": "ab", "n": 3, "max_tokens": 2}\n{"prompt": "cd", "max_tokens": 2}')
    assert run_main("--prompt-file", prompt, "--output", output, "--in-order", "--tool-choice", "auto") == 0
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(one["index"], one["request"], one["choice"], one["text"]) for one in lines] == [
        (0, 0, 0, "AB"),
        (1, 0, 1, "AB1"),
        (2, 0, 2, "AB2"),
        (3, 1, 0, "CD"),
    ]
    assert [one.n for one in made[0].params] == [3, 1]
    assert made[0].params[0].tool_choice == "auto"
    first = lines[0]["logprobs"]
    assert first is lines[0]["drafts"] is None
    prompt.write_text('{"prompt": "ab", "logprobs": 0, "max_tokens": 2}')
    assert run_main("--prompt-file", prompt, "--output", output) == 0
    (line,) = map(json.loads, output.read_text().splitlines())
    entry = {"bytes": [], "logprob": -1.0, "rank": 1, "top": [], "entropy": 1.0}
    assert line["logprobs"] == [{"id": i} | entry for i in b"AB"]
    flags = ["--include-drafts", "--max-tokens", 20, "--output", output]
    assert run_main("--prompt", "a prompt of some length", *flags) == 0
    (line,) = map(json.loads, output.read_text().splitlines())
    told = [number for one in line["drafts"] for number in one["token_ids"]]
    assert set(told) <= set(line["token_ids"])
    assert sum(one["num_accepted"] for one in line["drafts"]) == sum(line["metrics"]["accepted_by_index"]) > 0


@pytest.mark.parametrize("flags", [["--model", "/nowhere"], ["--top-p", "2"], []])
def test_a_mistake_leaves_the_output_of_an_earlier_run(
    engine: type[FakeEngine], tmp_path: Path, flags: list[str]
) -> None:
    prompt, output, new = tmp_path / "prompt.txt", tmp_path / "out.jsonl", tmp_path / "new.jsonl"
    prompt.write_text("x" if flags else "x" * 41)  # the engine refuses it as too long
    output.write_text("kept")
    for file in (output, new):
        assert run_main("--prompt-file", prompt, "--output", file, *flags) == 2
    assert output.read_text() == "kept"
    assert not new.exists()


def test_standard_input_and_an_output_that_exists(
    engine: type[FakeEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out.jsonl").write_text("old\n" * 99)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"ab"), encoding="utf-8"))
    assert run_main("--prompt-file", "-", "--output", tmp_path / "out.jsonl", "--max-tokens", 2) == 0
    assert json.loads((tmp_path / "out.jsonl").read_text())["text"] == "AB"


def pipe_without_a_reader() -> io.TextIOWrapper:
    reader, writer = os.pipe()
    os.close(reader)
    return open(writer, "w", encoding="utf-8")


@pytest.mark.parametrize("is_single", [False, True])
@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_the_output_is_written_after_the_reader_of_standard_output_left(
    engine: type[FakeEngine],
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    is_single: bool,
) -> None:
    if is_single:
        prompts = tmp_path / "prompt.txt"
        prompts.write_text("first one")
    output = tmp_path / "out.jsonl"
    with pipe_without_a_reader() as pipe:
        monkeypatch.setattr(sys, name, pipe)
        assert run_main("--prompt-file", prompts, "--output", output, "--max-tokens", 6) == 0
    texts = [json.loads(line)["text"] for line in output.read_text().splitlines()]
    assert texts == (["FIRST "] if is_single else ["A", "CHAT..", "FIRST ONE"])
    if name == "stdout":
        said = f"standard output ended (Broken pipe): from here on only {output} is written\n"
        assert capsys.readouterr().err.count(said) == 1


def test_without_an_output_a_reader_that_left_ends_the_run_quietly(
    engine: type[FakeEngine],
    prompts: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pipe_without_a_reader() as pipe:
        monkeypatch.setattr("sys.stdout", pipe)
        assert run_main("--prompt-file", prompts, "--max-tokens", 6) == 1
    assert "output tokens" not in capsys.readouterr().err


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
@pytest.mark.parametrize("is_output", [False, True])
def test_an_unwritable_output_is_named(
    engine: type[FakeEngine],
    prompts: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    is_output: bool,
) -> None:
    with open("/dev/full", "w") as full:
        if not is_output:
            monkeypatch.setattr("sys.stdout", full)
        flags = ("--output", "/dev/full") if is_output else ()
        assert run_main("--prompt-file", prompts, "--max-tokens", 6, *flags) == 2
    name = "/dev/full" if is_output else "standard output"
    assert capsys.readouterr().err.endswith(f"error: [Errno 28] No space left on device: '{name}'\n")


@pytest.mark.parametrize(
    "name, code, message",
    [
        ("stdin", 2, "error: prompt-file must not be - with standard input closed, got -; name a file\n"),
        ("stdout", 2, "error: standard output must be open, got a closed one; redirect it to /dev/null\n"),
        ("stderr", 0, ""),
    ],
)
def test_closed_streams(
    engine: type[FakeEngine],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    code: int,
    message: str,
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"ab"), encoding="utf-8"))
    monkeypatch.setattr(sys, name, None)
    assert run_main("--prompt-file", "-", "--max-tokens", 2) == code
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("" if code else "AB", message)
