"""Prompts of files and flags, and errors for wrong ones."""

from __future__ import annotations

import contextlib
import io
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from compiled_mtp.cli import jobs as cli_jobs
from compiled_mtp.cli.jobs import read_jobs
from compiled_mtp.request import derive_seed
from tests.cli.fakes import FakeEngine, made, run_main, without_labels


def test_standard_input_is_a_prompt(
    engine: type[FakeEngine], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("größe".encode()), encoding="latin-1"))
    assert run_main("--prompt-file", "-", "--max-tokens", 5) == 0
    assert capsys.readouterr().out == "GRÖSSE"[:5]


@pytest.mark.parametrize("is_stdin", [False, True])
def test_a_prompt_keeps_its_line_breaks_and_loses_its_byte_order_mark(
    engine: type[FakeEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_stdin: bool
) -> None:
    content, file = b"\xef\xbb\xbfa\r\nb\rc\nd\r\n", tmp_path / "prompt.txt"
    file.write_bytes(content)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))
    assert run_main("--prompt-file", "-" if is_stdin else file, "--max-tokens", 1) == 0
    assert made[0].answers["0"].rstrip(".") == "A\r\nB\rC\nD"


def test_lines_written_on_windows_are_read(engine: type[FakeEngine], tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "a\\r\\n"}\r\n{"prompt": "b"}\r\n')
    assert run_main("--prompt-file", file, "--max-tokens", 1) == 0
    assert [answer.rstrip(".") for answer in made[0].answers.values()] == ["A\r\n", "B"]


@pytest.mark.parametrize(
    "content, message",
    [
        ("", "prompt-file must hold a prompt, got {file}, which is empty"),
        ("{", "{file} line 1 must be a JSON object, got an error: Expecting"),
        ('{"prompt": "a"}\n[1]', "{file} line 2 must be a JSON object, got [1]"),
        ('{"max_tokens": 1}', "{file} line 1 must have one of prompt, messages, prompt_token_ids, got 0"),
        ('{"prompt": "a", "messages": []}', "{file} line 1 must have one of prompt, messages"),
        ('\n{"prompt": 3}', "{file} line 2: prompt must be a string, got '3'"),
        ('{"messages": "hi"}', "{file} line 1: messages must be a list of messages, got 'hi'"),
        ('{"prompt_token_ids": [1, 2.5]}', "{file} line 1: prompt_token_ids must be a list of integers"),
        ('{"prompt": "a", "top_p": 2}', "{file} line 1: top_p must be above 0 and at most 1, got 2.0"),
        ('{"prompt": "a", "topp": 2}', "{file} line 1: topp must be a sampling parameter"),
        ('{"prompt": "a", "topp": [{"x": true}]}', "{file} line 1: topp must be a sampling parameter"),
        (
            '{"prompt": "a", "id": [1]}',
            "{file} line 1: id must be a string or an integer, got [1]",
        ),
        ('{"prompt": "a", "id": true}', "{file} line 1: id must be a string or an integer, got True"),
        (
            '{"prompt": "a"}\n{"prompt": "a", "id": "\\ud800"}',
            "{file} line 2: id must be Unicode text, got '\\ud800'; leave lone surrogates out",
        ),
        ('{"prompt": "a", "self": 1}', "{file} line 1: self must be a sampling parameter"),
        ('{"prompt": "a", "max_tokens": true}', "{file} line 1: max_tokens must "),
        ('{"prompt": ' + "[" * 99999, "{file} line 1 must be a JSON object, got an error: maximum recursion"),
        ('{"prompt": "' + "a" * 41 + '"}', "{file} line 1: prompt must be shorter than max_model_len=40"),
    ],
)
def test_a_bad_line_is_named_in_one_line(
    engine: type[FakeEngine], tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, message: str
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    assert run_main("--prompt-file", file) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1
    assert made == [], "refused before the weights are loaded"
    assert errors[0].startswith("error: " + message.replace("{file}", str(file)))


def test_missing_and_unreadable_files_are_named(
    engine: type[FakeEngine], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main("--prompt-file", tmp_path / "none.txt") == 2
    assert "prompt-file must be readable, got" in capsys.readouterr().err
    assert run_main("--prompt-file", tmp_path) == 2
    assert f"prompt-file must be readable, got {tmp_path}: Is a directory" in capsys.readouterr().err
    (tmp_path / "latin.txt").write_bytes(b"gr\xf6\xdfe")
    assert run_main("--prompt-file", tmp_path / "latin.txt") == 2
    assert "prompt-file must be UTF-8 text" in capsys.readouterr().err


def test_one_seed_gives_every_line_its_own_seed_and_errors_are_printable(
    engine: type[FakeEngine], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": "b"}\n\n{"prompt": "c", "seed": 5}\n')
    jobs = read_jobs(str(file), {"seed": 9})
    assert [job.params.seed for job in jobs] == [9, derive_seed(9, 1), 5]
    file.write_text('{"prompt": "a", "stop": "' + "\\u001b" * 500_000 + '"}')
    assert run_main("--prompt-file", file) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.isprintable()
    assert len(line) < 1000


def test_the_lines_of_the_documentation_are_requests(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text(encoding="utf-8")
    file = tmp_path / "prompts.jsonl"
    file.write_text(text.split("```json\n")[1].split("```")[0])
    jobs = read_jobs(str(file), {})
    assert [job.id for job in jobs] == ["q1", "q2", None]
    assert [list(job.prompt) for job in jobs] == [["prompt"], ["messages"], ["prompt_token_ids"]]


def test_prompts_of_flags(engine: type[FakeEngine], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main("--prompt", "one\n", "--prompt", "two", "--max-tokens", 4, "--seed", 9) == 0
    printed = capsys.readouterr()
    assert without_labels(printed.out) == "TWO.\nONE\n\n"
    assert "--- 1 (prompt 1): length" in printed.out
    assert [params.seed for params in made[0].params] == [9, derive_seed(9, 1)]
    assert run_main("--prompt", "fine", "--prompt", "x" * 41) == 2
    assert capsys.readouterr().err.startswith("error: prompt 1: prompt must be shorter")
    assert len(made) == 1


def test_a_line_may_have_a_priority(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a", "priority": -3, "max_tokens": 2}\n{"prompt": "b"}\n')
    jobs = read_jobs(str(file), {})
    assert [job.prompt for job in jobs] == [{"prompt": "a", "priority": -3}, {"prompt": "b"}]
    assert jobs[0].params.max_tokens == 2


class Endless(io.RawIOBase):
    """Zeros without an end, like /dev/zero and /dev/full; reading far too many fails."""

    taken = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self.taken += len(buffer)
        assert self.taken < 2**22, "read without a bound"
        buffer[:] = bytes(len(buffer))
        return len(buffer)


def test_an_endless_prompt_is_refused(
    engine: type[FakeEngine], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_jobs, "_MOST_BYTES", 2**20, raising=False)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BufferedReader(Endless())))
    assert run_main("--prompt-file", "-") == 2
    assert "prompt-file must hold at most 1048576 bytes, got more in -; split it" in capsys.readouterr().err
    monkeypatch.setattr(Path, "open", lambda *_: io.BufferedReader(Endless()))
    monkeypatch.setattr("builtins.open", lambda *_: io.BufferedReader(Endless()))
    with pytest.raises(
        ValueError, match="prompt-file must hold at most 1048576 bytes, got more in /dev/full"
    ):
        read_jobs("/dev/full", {})


@pytest.mark.parametrize("more", [0, 1])
def test_a_pipe_is_read_up_to_the_bound(
    engine: type[FakeEngine],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    more: int,
) -> None:
    monkeypatch.setattr(cli_jobs, "_MOST_BYTES", 20, raising=False)
    pipe = tmp_path / "prompt.txt"
    os.mkfifo(pipe)

    def write() -> None:
        with contextlib.suppress(BrokenPipeError), pipe.open("wb") as stream:
            stream.write(b"x" * (20 + more))

    writer = threading.Thread(target=write)
    writer.start()
    assert run_main("--prompt-file", pipe, "--max-tokens", 1) == 2 * more
    writer.join()
    assert ("must hold at most 20 bytes" in capsys.readouterr().err) == bool(more)
