"""Runs jobs in processes that it kills when a job takes too long: a kernel that hangs never returns."""

from __future__ import annotations

import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

# Seconds in which a process must start.
_START_S = 60.0


@dataclass
class Worker:
    """One process and its job, -1 while the process starts; it has until `deadline` (time.monotonic)."""

    process: BaseProcess
    connection: Connection
    deadline: float
    job: int = -1


def serve(connection: Connection, work: Callable[[Any], str]) -> None:
    """Run in a worker: send an empty text once started, then a text per job until the pipe closes."""
    connection.send("")
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        try:
            text = work(job)
        except Exception as error:  # one bad job must not hide the others
            text = f"FAILED: {type(error).__name__}: {str(error)[-300:]}"
        connection.send(text)


def start(work: Callable[[Any], str], seconds: float) -> Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, work), daemon=True)
    process.start()
    theirs.close()
    return Worker(process, ours, time.monotonic() + seconds)


def stop(worker: Worker) -> None:
    worker.process.kill()
    worker.connection.close()


def run_jobs(
    work: Callable[[Any], str], jobs: Sequence[Any], workers: int, seconds: float
) -> Iterator[tuple[int, str]]:
    """Run jobs in up to `workers` processes; yield (index of the job, text from `work`) as they finish.

    work: a function at a module's top level. A job that takes longer than `seconds` yields "HUNG", and its
    process is killed with SIGKILL; a job whose process dies yields "DIED", one that raises "FAILED: ...".
    Raises RuntimeError if a process has not started after _START_S seconds. Closing the iterator kills the
    processes that still run.
    """
    waiting, active = deque(range(len(jobs))), list[Worker]()
    try:
        while waiting or active:
            starting = sum(worker.job < 0 for worker in active)
            while len(active) < workers and starting < len(waiting):
                active.append(start(work, _START_S))
                starting += 1
            until = min(worker.deadline for worker in active)
            ready = wait([w.connection for w in active], max(0.0, until - time.monotonic()))
            for worker in list(active):
                job, is_ready = worker.job, worker.connection in ready
                if not is_ready and time.monotonic() < worker.deadline:
                    continue
                try:
                    text = str(worker.connection.recv()) if is_ready else "HUNG"
                except EOFError:
                    text = "DIED"
                if job >= 0:
                    yield job, text
                elif text:
                    raise RuntimeError(f"a process must start within {_START_S:.0f} s, got {text}")
                if text in ("HUNG", "DIED") or not waiting:
                    active.remove(worker)
                    stop(worker)
                else:
                    worker.job, worker.deadline = waiting.popleft(), time.monotonic() + seconds
                    worker.connection.send(jobs[worker.job])
    finally:
        for worker in active:
            stop(worker)
