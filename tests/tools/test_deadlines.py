"""Jobs that hang or kill their process are named, and all other jobs are done."""

from __future__ import annotations

import importlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).parents[2] / "tools"


def work(job: str) -> str:
    if job == "hang":
        time.sleep(600)
    if job == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if job == "fail":
        raise ValueError("no such tile")
    return f"{job} done"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module("deadlines")


def test_a_hanging_job_is_killed_and_the_others_are_done(tool: Any) -> None:
    jobs = ["a", "hang", "b", "die", "fail", "c"]
    results = dict(tool.run_jobs(work, jobs, 2, 3.0))
    assert [results[i] for i in (0, 2, 5)] == ["a done", "b done", "c done"]
    assert results[3] == "DIED"
    assert results[4] == "FAILED: ValueError: no such tile"
    assert results[1] == "HUNG"


def test_leaving_early_kills_running_jobs(tool: Any) -> None:
    found = tool.run_jobs(work, ["a", "hang"], 1, 60.0)
    assert next(found) == (0, "a done")
    begin = time.monotonic()
    found.close()
    assert time.monotonic() - begin < 30
