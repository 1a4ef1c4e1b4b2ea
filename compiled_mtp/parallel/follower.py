"""The process of a rank other than 0: builds its shard of the model and runs rank 0's messages."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pickle
import platform
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from compiled_mtp.communicators.choose import join
from compiled_mtp.communicators.communicator import Communicator, CommunicatorError
from compiled_mtp.communicators.gloo import START_S
from compiled_mtp.config import Torchrun
from compiled_mtp.graphs.artifacts import source_digest
from compiled_mtp.models.catalogue import read_stored
from compiled_mtp.models.hf_config import read_model_config
from compiled_mtp.models.lora import read_adapter
from compiled_mtp.parallel.forks import wait_for_parent_end
from compiled_mtp.parallel.plans import PlanReader
from compiled_mtp.parallel.ranks import HEARTBEAT_S, RankJob
from compiled_mtp.parallel.torchrun import follow
from compiled_mtp.plan import StepPlan
from compiled_mtp.runner.numeric_settings import NumericSettings
from compiled_mtp.runner.runner import Runner
from compiled_mtp.runner.spec import resolve

# Two threads write reports, so each report must fit into one atomic write to a pipe.
_LONGEST_TEXT = 2000


def main(parent: int) -> None:
    """Run the pickled `RankJob` on stdin. This process ends with rank 0, the process `parent`."""
    job: RankJob = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_rank_0, args=(job.folder, parent), daemon=True).start()
    silence()
    # Do not wait for the threads of libraries.
    os._exit(run_job(job))


def follow_rank_0() -> None:
    """Run rank 0's jobs, if torchrun has started this process as a rank other than 0, and end with rank 0.

    Else does nothing. Raises ValueError if rank 0 does not come.
    """
    torchrun = Torchrun()
    if torchrun.has_others and torchrun.rank:
        silence()
        follow(torchrun, run_job)


def silence() -> None:
    """Log errors alone: rank 0 logs the same warnings."""
    logging.disable(logging.WARNING)


def run_job(job: RankJob) -> int:
    """Build the rank's shard and run rank 0's messages until "close".

    Returns 0, or 1 after an error that was reported to rank 0.
    """
    try:
        runner, communicator = _build(job)
    except ValueError as error:
        _report(job.report, kind="error", text=str(error)[:_LONGEST_TEXT], is_refusal=True)
        return 1
    except BaseException as error:
        _report_failure(job, error)
        return 1
    try:
        with _heartbeats(job.report, runner, communicator):
            _report(job.report, kind="ready")
            _follow(runner, communicator, PlanReader(job.rank, job.plans, job.wake))
    except CommunicatorError:
        # Rank 0 finds the lost rank, unless rank 0 is the lost one, and ends this process. It may be paused.
        time.sleep(START_S)
        return 1
    except BaseException as error:
        _report_failure(job, error)
        return 1
    return 0


def _build(job: RankJob) -> tuple[Runner, Communicator]:
    """Return the rank's runner, ready to run plans, and its communicator."""
    job.settings.apply()
    own = fingerprint(job.config.model, job.config.lora, has_files=job.fill is None)
    _report(job.report, kind="hello", hello=own)
    communicator = join(job.config.communicator, job.rank, job.world, job.folder, job.device_type)
    spec = resolve(job.config, job.model, job.num_valid_ids, is_checkpoint=job.fill is None)
    runner = Runner(spec.of_rank(communicator), None, job.fill, save_to=job.save_to)
    communicator.expect_steps()
    return runner, communicator


def _follow(runner: Runner, communicator: Communicator, plans: PlanReader) -> None:
    """Run rank 0's messages until "close"."""
    while True:
        name, *arguments = plans.receive()
        if name == "run":
            result = runner.run(StepPlan(*arguments))
            communicator.check()
            if result is None:
                continue
            if result.error is not None:
                raise RuntimeError(result.error)
            if result.copies_failed:
                # Rank 0 may have had enough memory, so this failure ends the ranks.
                raise MemoryError("no host memory to offload a request; lower offload_gb")
        elif name == "set_masks":
            masks, *fields = arguments
            runner.set_masks(StepPlan(*fields), torch.from_numpy(masks))
        elif name == "settings":
            arguments[0].apply()
        elif name == "close":
            runner.close()
            return
        else:
            getattr(runner, name)(*arguments)


def fingerprint(model: Path, lora: Path | None = None, *, has_files: bool) -> dict[str, str]:
    """Return name -> value of what all ranks must share. has_files: `model` and `lora` hold the weights.

    Reads torch's settings of the calling thread.
    """
    digest = hashlib.sha256()
    if has_files:
        digest.update(repr(read_model_config(model)).encode())
        for name, weight in sorted(read_stored(model).items(), key=lambda item: item[0]):
            digest.update(repr((name, weight.dtype, weight.shape, weight.file.stat().st_size)).encode())
        if lora is not None:
            digest.update(read_adapter(lora).key.encode())
    package = Path(__file__).parents[1]
    return {
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "source of compiled-mtp": source_digest((package, package / "ops", package / "graphs")),
        "checkpoint": digest.hexdigest()[:16],
        "instruction set of torch": torch.backends.cpu.get_cpu_capability(),
        **{f"torch's {name}": str(value) for name, value in asdict(NumericSettings.read()).items()},
    }


def _report_failure(job: RankJob, error: BaseException) -> None:
    text = f"{type(error).__name__}: {error}"[:_LONGEST_TEXT]
    _report(job.report, kind="error", text=text, is_refusal=False)


def _report(to: int, **report: Any) -> None:
    os.write(to, json.dumps(report).encode() + b"\n")


def _end_with_rank_0(folder: Path, parent: int) -> None:
    wait_for_parent_end(parent)
    # Rank 0 removes the folder unless it was killed.
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


@contextmanager
def _heartbeats(to: int, runner: Runner, communicator: Communicator) -> Iterator[None]:
    """Report this rank's counts of collectives and launches every second, from a separate thread."""
    is_over = threading.Event()

    def report() -> None:
        while not is_over.wait(HEARTBEAT_S):
            try:
                _report(to, kind="alive", count=communicator.count, launched=runner.num_launched)
            except OSError:
                os._exit(1)

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
