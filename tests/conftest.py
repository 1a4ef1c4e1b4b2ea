"""Test setup that must happen before any import of Triton.

Without a CUDA device the Triton kernels run in Triton's interpreter. Only process-wide setup belongs in this
file; fixtures belong beside their tests.
"""

from __future__ import annotations

import contextlib
import gc
import os

import pytest
import torch

# Collecting the tests imports what lives to the end. Looking through it again and again would take seconds.
gc.disable()

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Inductor ends its workers after a minute without a job, and later forks others out of a process that has
# threads. With many engines in one process such a fork has hung; one engine compiles without a pause.
os.environ["TORCHINDUCTOR_QUIESCE_ASYNC_COMPILE_POOL"] = "0"

# `make test` draws the same examples at each run and finds what a change breaks. `make soak` uses hypothesis'
# own profile and finds older bugs. GPU tests need no hypothesis.
with contextlib.suppress(ModuleNotFoundError):
    from hypothesis import settings

    settings.register_profile("repeatable", derandomize=True, database=None)
    settings.load_profile("repeatable")

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests import triton_interpreter

    triton_interpreter.compute_correctly()
    triton_interpreter.skip_repeated_work()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    # Else nanobind reports as leaked what the interpreter cannot collect at its end.
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
