"""The process beside the engine: what it made is there, however it ends its cause is told, nothing stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from compiled_mtp.graphs.maker import ProgramMaker

ROOT = Path(__file__).parents[2]
# Starts another process, names both and waits to be killed.
CHILD = f"""
import os, pathlib, subprocess, sys, time
sys.path.insert(0, {str(ROOT)!r})
from compiled_mtp.graphs.maker import end_with_parent
assert sys.stdin.buffer.readline() == b"order\\n"
folder = pathlib.Path(sys.argv[1])
end_with_parent(folder)
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], stdout=subprocess.DEVNULL)
for name in ("one", "two"):
    (folder / name).write_text(f"{{os.getpid()}} {{other.pid}} {{os.nice(0)}}")
    print(name, flush=True)
"""
WAITS = CHILD + "time.sleep(60)"
PARENT = f"""
import sys, time
sys.path.insert(0, {str(ROOT)!r})
from compiled_mtp.graphs.maker import ProgramMaker
maker = ProgramMaker({WAITS!r}, b"order\\n", lambda folder: None)
maker.start()
maker.wait_for("two")
print(maker.folder, (maker.folder / "two").read_text(), flush=True)
time.sleep(60)
"""


def make(code: str, check: Any = lambda folder: None) -> ProgramMaker:
    maker = ProgramMaker(code, b"order\n", check)
    maker.start()
    return maker


def is_alive(process: int) -> bool:
    """Whether it runs: what has ended and is not waited for by anybody does not."""
    try:
        return " Z " not in Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False


def wait_for_the_end(processes: list[int], folder: Path) -> None:
    end_s = time.monotonic() + 20
    while any(map(is_alive, processes)) or folder.exists():
        assert time.monotonic() < end_s, f"{processes} and {folder} must be gone"
        time.sleep(0.05)


def test_files_arrive_and_nothing_stays_after_closing() -> None:
    checked: list[Path] = []
    maker = make(WAITS, checked.append)
    maker.wait_for("two")
    maker.wait_for("one")
    *processes, niceness = map(int, (maker.folder / "one").read_text().split())
    assert niceness == 19
    assert checked == [maker.folder]
    assert all(map(is_alive, processes))
    maker.close()
    wait_for_the_end(processes, maker.folder)
    maker.close()


def test_how_it_ended_is_told() -> None:
    maker = make(WAITS)
    maker.wait_for("one")
    processes = [int(one) for one in (maker.folder / "one").read_text().split()[:2]]
    os.kill(processes[0], signal.SIGKILL)
    with pytest.raises(ValueError, match=r"got its end by SIGKILL \(memory may have run out\); give a graph"):
        maker.wait_for("three")
    wait_for_the_end(processes[1:], Path("/nowhere"))
    maker.close()
    for code, cause in (
        ("raise ValueError('the disk is full')", "its end with 'ValueError: the disk is full'"),
        ("raise SystemExit(3)", "its end with 'code 3'"),
        # While it listens for the end of the process above it.
        (
            CHILD + "other.kill(); time.sleep(0.2); raise ValueError('full')",
            "its end with 'ValueError: full'",
        ),
    ):
        maker = make(code)
        with pytest.raises(ValueError, match=cause):
            maker.wait_for("three")
        maker.close()
        assert not maker.folder.exists()


def test_what_does_not_fit_is_refused() -> None:
    def refuse(folder: Path) -> None:
        raise ValueError("graph_cache must be made for another layout")

    maker = make(CHILD, refuse)
    with pytest.raises(ValueError, match="another layout"):
        maker.wait_for("one")
    maker.close()


def test_closed_before_it_starts_nothing_is_started() -> None:
    maker = ProgramMaker(WAITS, b"", lambda folder: None)
    maker.close()
    maker.start()
    with pytest.raises(ValueError, match="got none"):
        maker.wait_for("one")


def test_without_a_process_the_cause_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr(subprocess, "Popen", fail)
    with pytest.raises(ValueError, match="must start, got Cannot allocate memory; give a graph_cache"):
        make(WAITS)


def test_it_ends_with_its_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        folder, *numbers = parent.stdout.readline().split()
        processes = [int(number) for number in numbers[:2]]
        assert all(map(is_alive, processes))
        parent.kill()
    wait_for_the_end(processes, Path(folder))


def test_it_ends_with_its_parent_whatever_that_has_forked() -> None:
    """One fork has ended as a script does, another lives on."""
    forks = (
        "import os\nchild = os.fork()\nif not child: sys.exit()\nos.waitpid(child, 0)\n"
        "assert maker.folder.exists()\nchild = os.fork()\nif not child: time.sleep(60)\n"
    )
    code = PARENT.replace("print(maker.folder", f"{forks}print(child, maker.folder")
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child, folder, *numbers = parent.stdout.readline().split()
        parent.kill()
        try:
            wait_for_the_end([int(number) for number in numbers[:2]], Path(folder))
            assert is_alive(int(child))
        finally:
            os.kill(int(child), signal.SIGKILL)


def test_it_imports_nothing_of_the_users_folder_and_leaves_no_file_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "random.py").write_text("raise SystemExit('the user has one, too')")
    monkeypatch.chdir(tmp_path)
    code = """
import pathlib, random, subprocess, tempfile
sys.stdin.buffer.readline()
child = "import os, tempfile; print(os.path.dirname(tempfile.mkstemp()[1]))"
beside = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, cwd="/").stdout.strip()
(pathlib.Path(sys.argv[1]) / "one").write_text(beside + "\\n" + tempfile.gettempdir())
print("one", flush=True)
"""
    maker = make(code)
    maker.wait_for("one")
    beside, own = (maker.folder / "one").read_text().split("\n")
    assert beside == str(maker.folder)
    assert own == tempfile.gettempdir()
    maker.close()
    assert not maker.folder.exists()
