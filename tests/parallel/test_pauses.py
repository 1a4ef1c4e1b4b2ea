"""Pauses of rank 0 and of all ranks, longer than the limits, lose nothing; a rank that hangs is named."""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from compiled_mtp.communicators import gloo
from compiled_mtp.engine import Engine
from compiled_mtp.parallel import ranks, running_clock
from compiled_mtp.parallel.ranks import RankError
from tests.checkpoints import write_checkpoint
from tests.engines import prompt_of
from tests.parallel.rank_engines import MOST_S, PARAMS, config_of, processes_of

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S, PAUSE_S = 1.4, 2.0
LONG = PARAMS.model_copy(update={"max_tokens": 40})
# In a rank: small limits, and from the moment that a file is there no launch, while it reports.
SMALL = """
import os, time
import compiled_mtp.communicators.gloo as gloo
gloo.STEP_S = {limit}
import compiled_mtp.parallel.ranks as ranks
ranks.HEARTBEAT_S = 0.2
import compiled_mtp.runner.runner as runner
run = runner.Runner.run
def run_or_hang(self, plan):
    while os.path.exists({hang!r}):
        time.sleep(0.1)
    return run(self, plan)
runner.Runner.run = run_or_hang
"""
# Rank 0 in a process that may be stopped.
PAUSED = """
import json, sys
from pathlib import Path
from tests.parallel import test_pauses as paused
directory, limit = Path(sys.argv[1]), float(sys.argv[2])
if limit:
    with paused.pytest.MonkeyPatch.context() as patch:
        paused.set_limits(patch, directory / "hang", limit)
        paused.serve(directory)
else:
    paused.serve(directory)
"""


def set_limits(monkeypatch: pytest.MonkeyPatch, hang: Path, limit: float = LIMIT_S) -> None:
    first, import_main, call = ranks._CODE.rpartition("from compiled_mtp")
    code = SMALL.format(limit=limit, hang=str(hang))
    monkeypatch.setattr(ranks, "_CODE", f"{first}\n{code}\n{import_main}{call}")
    monkeypatch.setattr(ranks, "SILENCE_S", limit)
    # Most looks hear nothing, as with the limits of the product.
    monkeypatch.setattr(ranks, "_POLL_S", 0.02)
    monkeypatch.setattr(ranks, "STEP_S", limit)
    monkeypatch.setattr(gloo, "STEP_S", limit)


def serve(directory: Path) -> None:
    """Print the processes of ranks, then the tokens of the same request again and again."""
    with Engine(config_of(directory)) as engine:
        print(json.dumps([each.pid for each in processes_of(engine)._by_rank.values()]), flush=True)
        while True:
            (output,) = engine.generate([prompt_of(5, 6, 300)], LONG)
            print(json.dumps(output.new_token_ids), flush=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("pauses"), tokenizer=True, num_layers=2, interval=2)


@pytest.fixture(scope="module")
def wanted(directory: Path) -> list[int]:
    """The tokens of one rank."""
    with Engine(config_of(directory, 1)) as engine:
        return engine.generate([prompt_of(5, 6, 300)], LONG)[0].new_token_ids


def check_pauses(directory: Path, wanted: list[int], limit: float, pauses: list[tuple[float, bool]]) -> None:
    """Stop rank 0, or all processes, for so many seconds each time, at random moments of a decode."""
    rng = random.Random(1)
    command = [sys.executable, "-c", PAUSED, str(directory), str(limit)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, text=True) as process:
        assert process.stdout is not None
        try:
            others = json.loads(process.stdout.readline())
            for seconds, has_all in pauses:
                assert json.loads(process.stdout.readline()) == wanted
                time.sleep(0.2 * rng.random())
                stopped = [process.pid, *(others if has_all else ())]
                for pid in stopped:
                    os.kill(pid, signal.SIGSTOP)
                time.sleep(seconds)
                for pid in stopped:
                    os.kill(pid, signal.SIGCONT)
            for _ in range(3):
                assert json.loads(process.stdout.readline()) == wanted
        finally:
            process.kill()


def test_rank_0_and_all_ranks_may_be_stopped(directory: Path, wanted: list[int]) -> None:
    check_pauses(directory, wanted, LIMIT_S, [(PAUSE_S, True), (PAUSE_S, False)])


@pytest.mark.soak
def test_pauses_of_eight_seconds(directory: Path, wanted: list[int]) -> None:
    check_pauses(directory, wanted, 0.0, [(8.0, index % 3 == 2) for index in range(9)])


def hold_interpreter() -> None:
    ctypes.PyDLL(None).usleep(int(PAUSE_S * 1e6))


def test_a_held_interpreter_is_no_silence_and_a_hang_is_named(
    directory: Path, wanted: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limits(monkeypatch, tmp_path / "hang")
    with Engine(config_of(directory)) as engine:
        engine.add_request(prompt_token_ids=prompt_of(5, 6, 300), params=LONG)
        outputs = engine.step()
        hold_interpreter()
        # Once between steps, and once within one: the other rank waits in a collective.
        threading.Thread(target=hold_interpreter, daemon=True).start()
        while not any(output.finish_reason for output in outputs):
            outputs = engine.step()
        (output,) = engine.generate([prompt_of(5, 6, 300)], LONG)
        assert output.new_token_ids == wanted
        (tmp_path / "hang").touch()
        begin = time.monotonic()
        with pytest.raises(RankError, match="got rank 1: it did not enter a collective within 1 s; create"):
            engine.generate([prompt_of(5, 6, 300)], LONG)
        assert time.monotonic() - begin < MOST_S


def test_a_pause_counts_as_one_look(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr(running_clock.time, "monotonic", lambda: now[0])
    clock = running_clock.RunningClock()
    for at, seconds in ((10.2, 0.2), (18.2, 0.6), (18.3, 0.7)):
        now[0] = at
        assert clock.read() == pytest.approx(seconds)
