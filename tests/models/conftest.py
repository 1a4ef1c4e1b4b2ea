"""Fixtures of several test files."""

from __future__ import annotations

import pytest


@pytest.fixture
def keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep FP8 weights in FP8 as on a GPU, computed by the references."""
    monkeypatch.setattr("compiled_mtp.ops.fp8.converts_fp8", lambda device: True)
