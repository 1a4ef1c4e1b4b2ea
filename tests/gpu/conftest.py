"""Prints failures at once: a run on a lent GPU may be ended by its time limit before the summary."""

from __future__ import annotations

import sys

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        print(f"\n{report.nodeid} {report.when}:\n{report.longreprtext}\n", file=sys.stderr, flush=True)
