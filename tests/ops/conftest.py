"""Fixtures of the operator tests."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session")
def interpreter() -> None:
    """Skip where kernels run on a device: tests/gpu covers there what the interpreter covers here."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("a CUDA device is present, tests/gpu runs the kernels on it")
