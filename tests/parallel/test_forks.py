"""A forked child of rank 0 ends no rank when it ends, and keeps no rank alive while it lives."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoints import write_checkpoint
from tests.parallel.test_torchrun import OPTIONS, start

ROOT = Path(__file__).resolve().parents[2]
# Seconds within which all processes must end after a rank is lost.
MOST_S = 10.0
# Its children: one exits like a script, through every `finally` and `with`, and one goes on.
SCRIPT = """
import json, os, sys, time
sys.path.insert(0, sys.argv[2])
from compiled_mtp import Engine, EngineConfig, SamplingParams
engine = Engine(EngineConfig(**json.loads(sys.argv[1])))
params = SamplingParams(max_tokens=8, seed=3, ignore_eos=True)
before = engine.generate(["hello"], params)[0].new_token_ids
child = os.fork()
if not child:
    with engine:
        try:
            engine.generate(["hello"], params)
        except ValueError as error:
            print(error, flush=True)
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
assert engine.generate(["hello"], params)[0].new_token_ids == before
child = os.fork()
if not child:
    time.sleep(600)
processes = engine.runner._ranks._processes
assert processes.folder.exists()
print(child, os.getpid(), processes._by_rank[1].pid, processes.folder, flush=True)
time.sleep(600)
"""
FORK = (
    "engine must be used in the process that created it, got a fork of that process; create another one there"
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("forks"), tokenizer=True, num_layers=2, interval=2)


def wait_until(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + MOST_S
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.05)


def is_gone(pid: int) -> bool:
    """Return whether the process is gone; a zombie counts as gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def check_forks(process: subprocess.Popen[str], tmp_path: Path) -> None:
    """Check the forks of a process that runs SCRIPT."""
    assert process.stdout is not None
    refused, named = process.stdout.readline(), process.stdout.readline()
    try:
        assert refused.strip() == FORK
        child, own, rank, folder = named.split()
        os.kill(int(own), signal.SIGKILL)
        try:
            wait_until(lambda: is_gone(int(rank)))
            assert not is_gone(int(child))
            assert not Path(folder).exists()
            wait_until(lambda: not list(tmp_path.glob("compiled_mtp*")))
        finally:
            os.kill(int(child), signal.SIGKILL)
    finally:
        process.kill()
        process.wait(60)
        process.stdout.close()


def test_ranks_end_with_rank_0_despite_its_forks(directory: Path, tmp_path: Path) -> None:
    config = json.dumps(OPTIONS | {"tensor_parallel": 2, "model": str(directory)})
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, config, str(ROOT)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
    )
    check_forks(process, tmp_path)


def test_ranks_of_torchrun_end_with_rank_0_despite_its_forks(directory: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    config = json.dumps(OPTIONS | {"tensor_parallel": 2, "model": str(directory)})
    check_forks(start(tmp_path, 2, str(script), config, str(ROOT)), tmp_path)
