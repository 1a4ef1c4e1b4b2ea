"""Bars, signals and the code that commands share."""

from __future__ import annotations

import io
import os
import resource
import signal
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from compiled_mtp.terminal.console import Interrupts, Progress, run_command, say
from tests.cli.fakes import Terminal


def test_a_bar_in_a_terminal_and_a_line_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, pipe = Terminal(), io.StringIO()
    for stream in (terminal, pipe):
        monkeypatch.setattr("sys.stderr", stream)
        progress = Progress()
        for done in range(1, 4):
            progress("weights", done, 3)
    assert "weights:" in terminal.getvalue()
    assert "\r" in terminal.getvalue()
    assert pipe.getvalue() == "weights: done\n"


def test_bars_of_unfinished_work_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    progress = Progress()
    progress("shapes", 1, 3)
    progress.close()
    before = terminal.getvalue()
    progress.close()
    assert terminal.getvalue() == before
    assert before.endswith("\r")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_a_command_with_the_shells_exit_code(
    capsys: pytest.CaptureFixture[str], number: int, code: int
) -> None:
    before = signal.getsignal(number)

    def command(interrupts: Interrupts) -> int:
        with interrupts.held():
            signal.raise_signal(number)
            assert interrupts.is_asked
        signal.raise_signal(number)
        raise AssertionError("the signal did not arrive")

    assert run_command(command) == code
    assert capsys.readouterr().err == "interrupted: nothing more was done\n"
    assert signal.getsignal(number) == before


def test_a_second_signal_does_not_wait() -> None:
    def command(interrupts: Interrupts) -> int:
        with interrupts.held():
            signal.raise_signal(signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        with interrupts.held():
            assert not interrupts.is_asked
        return 7

    assert run_command(command) == 7


def test_commands_run_in_any_thread() -> None:
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(run_command(lambda interrupts: 5)))
    thread.start()
    thread.join()
    assert codes == [5]


def test_weights_on_a_full_disk_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("numpy")

    def command(interrupts: Interrupts) -> int:
        # A limit on file sizes gives the error of a full disk.
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
        try:
            save_file({"a": torch.zeros(4096)}, tmp_path / "a.safetensors")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        return 0

    assert run_command(command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert "File too large" in line


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_under_standard_error_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def command(interrupts: Interrupts) -> int:
        say("weights: done")
        say("tokens: 3")
        return 0

    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stderr", full)
        assert run_command(command) == 0
