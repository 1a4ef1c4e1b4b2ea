"""The console script: its commands, its version, and its output without a command."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

import compiled_mtp
from compiled_mtp.cli import serve
from compiled_mtp.cli.main import COMMANDS, main

ROOT = Path(__file__).parents[2]


def exit_code(*argv: str) -> int:
    try:
        return main(argv)
    except SystemExit as error:
        return int(error.code or 0)


def test_the_version_is_the_packages(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert compiled_mtp.__version__ == importlib.metadata.version("compiled-mtp")
    for argv in ((), ("run",), ("chat",), ("serve",), ("export",), ("quantize",)):
        assert exit_code(*argv, "--version") == 0
        assert capsys.readouterr().out == f"compiled-mtp {compiled_mtp.__version__}\n"

    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(importlib.metadata, "version", absent)
    assert compiled_mtp.__version__ == "0+uninstalled"


@pytest.mark.parametrize("argv", [(), ("walk",), ("--prompt", "x")])
def test_without_a_command_one_line_names_them_all(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...]
) -> None:
    assert exit_code(*argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert line.endswith("--help lists the flags")
    if argv != ("--prompt", "x"):
        assert all(name in line for name in COMMANDS)


def test_help_tells_what_each_command_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("--help") == 0
    printed = capsys.readouterr().out
    assert all(described in printed for described in COMMANDS.values())
    for name in COMMANDS:
        assert exit_code(name, "--help") == 0
        assert f"usage: compiled-mtp {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("door", "flags", "says"),
    [
        ("compiled_mtp run", "--prompt-file /nowhere", "prompt-file must be readable, got /nowhere: No such"),
        ("compiled_mtp.run", "--prompt-file /nowhere", "prompt-file must be readable, got /nowhere: No such"),
        ("compiled_mtp serve", "--drain-timeout-s -1", "drain_timeout_s must be"),
        ("compiled_mtp.server", "--drain-timeout-s -1", "drain_timeout_s must be"),
    ],
)
def test_every_entry_point_runs_the_same_commands(door: str, flags: str, says: str) -> None:
    command = [sys.executable, "-m", *door.split(), *flags.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {says}")


def test_a_service_without_its_packages_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "compiled_mtp.server.serve", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert serve.main([]) == 2
    said = "error: serve needs the package uvicorn, got none; pip install 'compiled-mtp[server]'\n"
    assert capsys.readouterr().err == said
