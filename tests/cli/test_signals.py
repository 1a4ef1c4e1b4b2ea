"""Ctrl-C and SIGTERM while a command imports its modules."""

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
# An imported module may handle KeyboardInterrupt in its own way.
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
        ("torch", ("export", "--output", "x.zip"), signal.SIGTERM, 143),
        ("torch", ("quantize", "a", "--output", "b"), signal.SIGINT, 130),
        # Imported while the command is looked up.
        ("tqdm", ("run", "--prompt", "x"), signal.SIGINT, 130),
        ("argparse", (), signal.SIGTERM, 143),
        # After torch, and before any object is made that would stay.
        ("tokenizers", ("export", "--output", "x.zip"), signal.SIGINT, 130),
    ],
)
def test_a_signal_ends_an_import_at_once(
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
    *earlier, last = done.stderr.splitlines()
    assert (done.returncode, last) == (code, "interrupted: nothing more was done")
    # A service has its port, and says so, before it imports torch.
    assert len(earlier) == (words[:1] == ("serve",))
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".zip"] == []
    assert [*temporary.iterdir()] == []


def test_the_earlier_handlers_are_restored() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with leaving():
        assert signal.getsignal(signal.SIGINT) not in before
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_other_threads_import_as_usual() -> None:
    found: list[object] = []

    def import_something() -> None:
        with leaving():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=import_something)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGINT)]
