"""A conversation: which turns it keeps, what ends it, and its look in a terminal."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from compiled_mtp.cli import chat
from compiled_mtp.request import RequestHistory, RequestMetrics, RequestOutput, SamplingParams, derive_seed
from tests.cli.fakes import Terminal

ROOT = Path(__file__).parents[2]
Messages = Sequence[dict[str, str]]


class Talker:
    """An engine and its request processor: answers with the texts of `script`, a few characters at a time."""

    num_threads = None
    weight_recipe = None
    max_model_len = 100

    def __init__(self) -> None:
        self.script: list[str] = []
        self.asked: list[tuple[Messages, SamplingParams]] = []
        self.opening = ""
        self.tokenizer = self
        self.closed = False
        self.before_part: Callable[[], None] = lambda: None
        self.added_ids = {"<think>": 1, "</think>": 2}

    def encode(self, text: str) -> list[int]:
        """Return a token for each tag and for each other character."""
        ids: list[int] = []
        for part in re.split("(</?think>)", text):
            ids += [self.added_ids[part]] if part in self.added_ids else map(ord, part)
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        return chr(token_id).encode()

    def apply_chat_template(self, messages: Messages, **variables: Any) -> str:
        return str([*messages, variables]) + self.opening

    def make_request(self, request_id: str, params: SamplingParams, **prompt: Any) -> None:
        if prompt["messages"][0]["content"] == "refused":
            raise ValueError("messages must satisfy the checkpoint's chat template, got: no; change them")

    def stream(self, *, messages: Messages, params: SamplingParams) -> Iterator[RequestOutput]:
        if sum(len(one["content"]) for one in messages) > 100:
            raise ValueError("prompt must be shorter than max_model_len=100 tokens, got more; shorten it")
        self.asked.append((messages, params))
        text = self.script.pop(0)
        for at in range(0, len(text), 5):
            self.before_part()
            metrics = RequestMetrics(RequestHistory(9, 1), at // 5, at + 1, 0.5)
            reason = "stop" if at + 5 >= len(text) else None
            yield RequestOutput("x", [1], text[at : at + 5], metrics, reason)

    def __enter__(self) -> Talker:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True


@pytest.fixture
def talker(monkeypatch: pytest.MonkeyPatch) -> Talker:
    made = Talker()
    engine = types.SimpleNamespace(Engine=lambda config, **_: made)
    monkeypatch.setitem(sys.modules, "compiled_mtp.engine", engine)
    checkpoint = types.SimpleNamespace(open_frontend=lambda config: made)
    monkeypatch.setitem(sys.modules, "compiled_mtp.frontend.checkpoint", checkpoint)
    return made


def talk(monkeypatch: pytest.MonkeyPatch, *lines: str, flags: Sequence[str] = ()) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    return chat.main(flags)


def test_every_turn_sees_the_ones_before_until_they_are_cleared(
    talker: Talker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    talker.script = ["one answer", "two", "three"]
    flags = ("--system", "be brief", "--seed", "5", "--chat-template-kwargs", '{"enable_thinking": false}')
    assert talk(monkeypatch, "first", "", "second", "/clear", "third", "/exit", "no", flags=flags) == 0
    assert capsys.readouterr().out == "one answer\ntwo\nthree\n"
    system = {"role": "system", "content": "be brief"}
    begin = [system, {"role": "user", "content": "first"}]
    assert [messages for messages, _ in talker.asked] == [
        begin,
        [*begin, {"role": "assistant", "content": "one answer"}, {"role": "user", "content": "second"}],
        [system, {"role": "user", "content": "third"}],
    ]
    params = [params for _, params in talker.asked]
    assert [one.seed for one in params] == [derive_seed(5, turn) for turn in range(3)]
    assert {one.max_tokens for one in params} == {100}
    assert params[0].chat_template_kwargs == {"enable_thinking": False}
    assert talker.closed


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("is_terminal", [True, False])
def test_reasoning_is_dimmed_or_plain_and_kept_apart(
    talker: Talker,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    is_open: bool,
    is_terminal: bool,
) -> None:
    talker.opening = "<think>\n" if is_open else ""
    talker.script = [("" if is_open else "<think>\n") + "let me see\n</think>\n\nyes \x1b[31m \x9b31m", "no"]
    terminal = Terminal()
    if is_terminal:
        monkeypatch.setattr("sys.stdout", terminal)
    assert talk(monkeypatch, "first", "second") == 0
    shown = terminal.getvalue() if is_terminal else capsys.readouterr().out
    if is_terminal:
        assert shown.startswith(
            "\x1b[2mlet me see\x1b[0m\n\nyes \N{SYMBOL FOR ESCAPE}[31m \N{SYMBOL FOR ESCAPE}31m\n"
        )
    else:
        assert shown.startswith("let me see\n\nyes \x1b[31m \x9b31m\n")
    reply = talker.asked[1][0][1]
    assert reply == {
        "role": "assistant",
        "content": "yes \x1b[31m \x9b31m",
        "reasoning_content": "let me see",
    }


def test_tags_that_are_no_tokens_are_text(
    talker: Talker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    talker.added_ids, talker.script = {}, ["<think>x</think>y"]
    assert talk(monkeypatch, "first") == 0
    assert capsys.readouterr().out == "<think>x</think>y\n"


def test_ctrl_c_ends_an_answer_and_keeps_the_session(
    talker: Talker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    talker.script = ["a long answer", "<think>x", "more"]
    parts = iter([False, True] + [True] + [False] * 9)
    talker.before_part = lambda: signal.raise_signal(signal.SIGINT) if next(parts) else None
    assert talk(monkeypatch, "first", "second", "third") == 0
    printed = capsys.readouterr()
    assert printed.out == "a long ans\n<thin\nmore\n"
    assert printed.err.count("interrupted]") == 2
    kept = [one["content"] for one in talker.asked[2][0]]
    assert kept[:3] == ["first", "a long ans", "second"]


def test_sigterm_ends_the_session(talker: Talker, monkeypatch: pytest.MonkeyPatch) -> None:
    talker.script = ["a long answer"]
    talker.before_part = lambda: signal.raise_signal(signal.SIGTERM)
    assert talk(monkeypatch, "first", "second") == 143
    assert len(talker.asked) == 1
    assert talker.closed


@pytest.mark.parametrize(("numbers", "code"), [([signal.SIGINT, signal.SIGINT], 0), ([signal.SIGTERM], 143)])
def test_signals_at_the_prompt(
    talker: Talker, monkeypatch: pytest.MonkeyPatch, numbers: list[signal.Signals], code: int
) -> None:
    asked: list[str] = []

    def ask(text: str) -> str:
        asked.append(text)
        if not numbers:
            raise EOFError
        signal.raise_signal(numbers.pop())
        raise AssertionError("the signal did not arrive")

    monkeypatch.setattr("builtins.input", ask)
    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("sys.stdout", Terminal())
    assert chat.main([]) == code
    assert set(asked) == {"> "}
    assert talker.closed


def test_the_prompt_is_not_on_standard_output(
    talker: Talker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    talker.script = ["a"]
    monkeypatch.setattr("sys.stdin", Terminal("first\n"))
    assert chat.main([]) == 0
    printed = capsys.readouterr()
    assert printed.out == "a\n"
    assert printed.err.count("> ") == 2


def test_a_message_that_does_not_fit_is_reported_and_dropped(
    talker: Talker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    talker.script = ["a", "b"]
    assert talk(monkeypatch, "first", "x" * 101, "/help", "third") == 0
    printed = capsys.readouterr()
    assert printed.out == "a\nb\n"
    assert "error: prompt must be shorter than max_model_len=100 tokens, got more; shorten it; /clear" in (
        printed.err
    )
    assert "/exit ends the chat, /clear starts a new one" in printed.err
    assert [one["content"] for one in talker.asked[1][0]] == ["first", "a", "third"]


def test_a_line_that_is_no_utf_8_is_one_message(talker: Talker, monkeypatch: pytest.MonkeyPatch) -> None:
    talker.script = ["a", "b", "c"]
    stdin = io.TextIOWrapper(io.BytesIO(b"first\n\xff\nthird\n"), encoding="utf-8", errors="strict")
    monkeypatch.setattr("sys.stdin", stdin)
    assert chat.main([]) == 0
    assert [messages[-1]["content"] for messages, _ in talker.asked] == ["first", "\udcff", "third"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--system", "refused"], "error: messages must satisfy the checkpoint's chat template"),
        (["--temperature", "3"], "error: temperature must be from 0 to 2, got 3.0"),
        (["--n", "2"], "error: unrecognized arguments: --n 2; --help lists the flags"),
    ],
)
def test_refusals_before_the_weights(
    talker: Talker,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    message: str,
) -> None:
    monkeypatch.setitem(sys.modules, "compiled_mtp.engine", None)
    try:
        code = talk(monkeypatch, "x", flags=flags)
    except SystemExit as error:
        code = int(error.code or 0)
    assert code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(message)


def test_a_closed_standard_input(talker: Talker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert chat.main([]) == 2


class Session:
    """`compiled-mtp chat` in its own pseudo-terminal."""

    def __init__(self, *flags: str) -> None:
        self.master, terminal = pty.openpty()
        command = [sys.executable, "-m", "compiled_mtp", "chat", "--device", "cpu", *flags]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True
        )
        os.close(terminal)
        self.shown = ""

    def read_until(self, text: str, after: int = 0) -> int:
        """Wait until `text` is shown after the first `after` characters; return where it ends."""
        deadline = time.monotonic() + 100
        while text not in self.shown[after:]:
            assert time.monotonic() < deadline, self.shown
            if select.select([self.master], [], [], 1.0)[0]:
                try:
                    self.shown += os.read(self.master, 4096).decode("utf-8", "replace")
                except OSError:  # The other side is closed.
                    break
        assert text in self.shown[after:], self.shown
        return self.shown.index(text, after) + len(text)

    def interrupt(self, text: str, after: int) -> int:
        """Press Ctrl-C until `text` is shown: readline may miss one that comes just before it waits."""
        for _ in range(20):
            self.process.send_signal(signal.SIGINT)
            deadline = time.monotonic() + 3
            while text not in self.shown[after:] and time.monotonic() < deadline:
                if select.select([self.master], [], [], 0.2)[0]:
                    self.shown += os.read(self.master, 4096).decode("utf-8", "replace")
            if text in self.shown[after:]:
                break
        return self.read_until(text, after)

    def write(self, text: str) -> None:
        os.write(self.master, text.encode())


def test_in_a_terminal() -> None:
    """Ctrl-C in an answer, Ctrl-C at the prompt, a turn after both, Ctrl-D."""
    session = Session("--max-tokens", "400", "--max-model-len", "4096", "--ignore-eos")
    try:
        at = session.read_until("> ", session.read_until("Ctrl-C ends an answer"))
        session.write("def f(x):\n")
        at = session.read_until("\n", session.read_until("def f(x):", at))
        # The answer has begun to appear.
        session.read_until("e", at)
        session.process.send_signal(signal.SIGINT)
        at = session.read_until("> ", session.read_until("interrupted]", at))
        at = session.read_until("> ", session.interrupt("/exit or Ctrl-D ends the chat", at))
        session.write("/help\n")
        at = session.read_until("> ", session.read_until("/clear starts a new one", at))
        session.write("\x04")
        assert session.process.wait(60) == 0
    finally:
        session.process.kill()
        session.process.wait()
        os.close(session.master)
