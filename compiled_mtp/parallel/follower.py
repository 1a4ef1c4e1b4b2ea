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
from pathlib import Path
from typing import Any

import torch

from compiled_mtp.graphs.artifacts import source_digest
from compiled_mtp.models.headers import read_headers
from compiled_mtp.parallel.choose import join
from compiled_mtp.parallel.exchange import Exchange, ExchangeError
from compiled_mtp.parallel.gloo import STEP_S
from compiled_mtp.parallel.plans import PlanReader
from compiled_mtp.parallel.ranks import ALIVE_S, RankOrder
from compiled_mtp.plan import StepPlan
from compiled_mtp.runner import Runner

# A report is written at once, or two threads' would mix: less than a pipe takes as a whole.
_LONGEST_TEXT = 2000


def main() -> None:
    """Carry out the pickled `RankOrder` on stdin; ends with stdin, which is rank 0's end."""
    order: RankOrder = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_rank_0, args=(order.folder,), daemon=True).start()
    # Rank 0 warns of the same.
    logging.disable(logging.WARNING)
    code = 1
    try:
        runner, exchange = _build(order)
    except ValueError as error:
        _report(order.report, kind="error", text=str(error)[:_LONGEST_TEXT], is_refusal=True)
    except BaseException as error:
        _report_failure(order, error)
    else:
        try:
            _follow(runner, exchange, PlanReader(order.rank, order.plans, order.wake))
            code = 0
        except ExchangeError:
            # Rank 0 knows which rank it is, or is itself the one, and ends this process.
            time.sleep(STEP_S)
        except BaseException as error:
            _report_failure(order, error)
    # Threads of libraries are not waited for.
    os._exit(code)


def _build(order: RankOrder) -> tuple[Runner, Exchange]:
    """The rank's runner, ready, and its way to the others."""
    _report(order.report, kind="hello", hello=fingerprint(order.config.model, has_files=order.fill is None))
    exchange = join(order.config.exchange, order.rank, order.world, order.folder, order.device_type)
    runner = Runner(
        order.config, order.model, order.num_valid_ids, None, order.fill, order.features, exchange
    )
    exchange.expect_steps()
    threading.Thread(target=_say_alive, args=(order.report, exchange), daemon=True).start()
    _report(order.report, kind="ready")
    return runner, exchange


def _follow(runner: Runner, exchange: Exchange, plans: PlanReader) -> None:
    """Do what rank 0 does, until it says close."""
    while True:
        name, *arguments = plans.receive()
        if name == "run":
            result = runner.run(StepPlan(*arguments))
            exchange.check()
            if result is None:
                continue
            if result.error is not None:
                raise RuntimeError(result.error)
            if result.copies_failed:
                # Rank 0 may have had the memory.
                raise MemoryError("no host memory for a request that has to leave; lower offload_gb")
        elif name == "close":
            runner.close()
            return
        else:
            getattr(runner, name)(*arguments)


def fingerprint(model: Path, *, has_files: bool) -> dict[str, str]:
    """What every rank must have alike, by name; has_files: weights are read from those of `model`."""
    digest = hashlib.sha256()
    if has_files:
        digest.update((model / "config.json").read_bytes())
        for name, header in sorted(read_headers(model).items()):
            digest.update(repr((name, header.dtype, header.shape, header.file.stat().st_size)).encode())
    package = Path(__file__).parents[1]
    folders = [package / name for name in ("cache", "graphs", "models", "ops", "parallel")]
    return {
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "source of compiled-mtp": source_digest([*sorted(package.glob("*.py")), *folders]),
        "checkpoint": digest.hexdigest()[:16],
    }


def _report_failure(order: RankOrder, error: BaseException) -> None:
    text = f"{type(error).__name__}: {error}"[:_LONGEST_TEXT]
    _report(order.report, kind="error", text=text, is_refusal=False)


def _report(to: int, **report: Any) -> None:
    os.write(to, json.dumps(report).encode() + b"\n")


def _end_with_rank_0(folder: Path) -> None:
    sys.stdin.buffer.read()
    # Where rank 0 was killed nobody else does.
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _say_alive(to: int, exchange: Exchange) -> None:
    while True:
        time.sleep(ALIVE_S)
        try:
            _report(to, kind="alive", count=exchange.count)
        except OSError:
            os._exit(1)
