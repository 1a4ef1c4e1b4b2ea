"""Ctrl-C and SIGTERM while a command imports what it needs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from compiled_mtp.terminal.signals import leaving

ROOT = Path(__file__).parents[2]
# What an import makes of KeyboardInterrupt is its own affair.
SWALLOWING = """
import os, signal, time
try:
    os.kill(os.getpid(), {number})
    time.sleep(1)
except BaseException:
    pass
raise RuntimeError("the import went on")
"""


@pytest.mark.parametrize(
    ("package", "words", "number", "code"),
    [
        ("torch", ("run", "--prompt", "x"), signal.SIGINT, 130),
        ("torch", ("chat",), signal.SIGINT, 130),
        ("torch", ("serve", "--port", "0"), signal.SIGTERM, 143),
        ("torch", ("export", "--out", "x.zip"), signal.SIGTERM, 143),
        ("torch", ("quantize", "a", "b"), signal.SIGINT, 130),
        # They are imported while the command is looked for.
        ("tqdm", ("run", "--prompt", "x"), signal.SIGINT, 130),
        ("argparse", (), signal.SIGTERM, 143),
        # Behind torch, before anything is made that would stay.
        ("tokenizers", ("export", "--out", "x.zip"), signal.SIGINT, 130),
    ],
)
def test_an_import_is_left_at_once(
    tmp_path: Path, package: str, words: tuple[str, ...], number: signal.Signals, code: int
) -> None:
    (tmp_path / f"{package}.py").write_text(SWALLOWING.format(number=int(number)))
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "TMPDIR": str(temporary)}
    done = subprocess.run(
        [sys.executable, "-m", "compiled_mtp", *words],
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (code, "interrupted: nothing more was done\n")
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".zip"] == []
    assert [*temporary.iterdir()] == []


def test_the_handlers_from_before_are_there_again() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with leaving():
        assert signal.getsignal(signal.SIGINT) not in before
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_other_threads_import_as_they_always_did() -> None:
    found: list[object] = []

    def import_something() -> None:
        with leaving():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=import_something)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGINT)]
