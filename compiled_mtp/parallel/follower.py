"""The process of a rank other than 0: builds its piece of the model and does what rank 0 sends."""

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
from compiled_mtp.parallel.forks import wait_for_parent_end
from compiled_mtp.parallel.plans import PlanReader
from compiled_mtp.parallel.ranks import ALIVE_S, RankOrder
from compiled_mtp.parallel.torchrun import follow
from compiled_mtp.plan import StepPlan
from compiled_mtp.runner.numeric_settings import NumericSettings
from compiled_mtp.runner.runner import Runner
from compiled_mtp.runner.spec import resolve

# A report is written at once, or two threads' would mix: less than a pipe takes as a whole.
_LONGEST_TEXT = 2000


def main(parent: int) -> None:
    """Carry out the pickled `RankOrder` on stdin; ends with rank 0, the process `parent`."""
    order: RankOrder = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_rank_0, args=(order.folder, parent), daemon=True).start()
    silence()
    # Threads of libraries are not waited for.
    os._exit(carry_out(order))


def follow_rank_0() -> None:
    """In a process that torchrun has started as another rank than 0: do what rank 0 says, and end with it.

    Elsewhere nothing. Raises ValueError where rank 0 does not come.
    """
    torchrun = Torchrun()
    if torchrun.has_others and torchrun.rank:
        silence()
        follow(torchrun, carry_out)


def silence() -> None:
    """Say no more than errors: rank 0 warns of the same."""
    logging.disable(logging.WARNING)


def carry_out(order: RankOrder) -> int:
    """Build the rank's piece and follow plans until rank 0 says close; then 0, and 1 for what went wrong,
    which has been reported."""
    try:
        runner, communicator = _build(order)
    except ValueError as error:
        _report(order.report, kind="error", text=str(error)[:_LONGEST_TEXT], is_refusal=True)
        return 1
    except BaseException as error:
        _report_failure(order, error)
        return 1
    try:
        with _saying_alive(order.report, runner, communicator):
            _report(order.report, kind="ready")
            _follow(runner, communicator, PlanReader(order.rank, order.plans, order.wake))
    except CommunicatorError:
        # Rank 0 knows which rank it is, or is itself the one, and ends this process; it may be paused.
        time.sleep(START_S)
        return 1
    except BaseException as error:
        _report_failure(order, error)
        return 1
    return 0


def _build(order: RankOrder) -> tuple[Runner, Communicator]:
    """The rank's runner, ready, and its way to the others."""
    order.settings.apply()
    _report(order.report, kind="hello", hello=fingerprint(order.config.model, has_files=order.fill is None))
    communicator = join(order.config.exchange, order.rank, order.world, order.folder, order.device_type)
    spec = resolve(order.config, order.model, order.num_valid_ids, is_checkpoint=order.fill is None)
    runner = Runner(spec.of_rank(communicator), None, order.fill, save_to=order.save_to)
    communicator.expect_steps()
    return runner, communicator


def _follow(runner: Runner, communicator: Communicator, plans: PlanReader) -> None:
    """Do what rank 0 does, until it says close."""
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
                # Rank 0 may have had the memory.
                raise MemoryError("no host memory for a request that has to leave; lower offload_gb")
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


def fingerprint(model: Path, *, has_files: bool) -> dict[str, str]:
    """What every rank must have alike, by name; has_files: weights are read from those of `model`.

    Reads torch's settings of the thread that calls it.
    """
    digest = hashlib.sha256()
    if has_files:
        digest.update(repr(read_model_config(model)).encode())
        for name, weight in sorted(read_stored(model).items(), key=lambda item: item[0]):
            digest.update(repr((name, weight.dtype, weight.shape, weight.file.stat().st_size)).encode())
    package = Path(__file__).parents[1]
    folders = [package / name for name in ("cache", "graphs", "models", "ops", "parallel")]
    return {
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "source of compiled-mtp": source_digest([*sorted(package.glob("*.py")), *folders]),
        "checkpoint": digest.hexdigest()[:16],
        "instruction set of torch": torch.backends.cpu.get_cpu_capability(),
        **{f"torch's {name}": str(value) for name, value in asdict(NumericSettings.read()).items()},
    }


def _report_failure(order: RankOrder, error: BaseException) -> None:
    text = f"{type(error).__name__}: {error}"[:_LONGEST_TEXT]
    _report(order.report, kind="error", text=text, is_refusal=False)


def _report(to: int, **report: Any) -> None:
    os.write(to, json.dumps(report).encode() + b"\n")


def _end_with_rank_0(folder: Path, parent: int) -> None:
    wait_for_parent_end(parent)
    # Where rank 0 was killed nobody else does.
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


@contextmanager
def _saying_alive(to: int, runner: Runner, communicator: Communicator) -> Iterator[None]:
    """Report every second how far this rank is, from a thread of its own."""
    is_over = threading.Event()

    def report() -> None:
        while not is_over.wait(ALIVE_S):
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
