"""Long random traffic: the state machine of the engine for minutes instead of seconds (make soak)."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

from tests.test_engine_machine import EngineMachine


@pytest.mark.soak
@pytest.mark.timeout(3600)
class TestSoak(EngineMachine.TestCase):
    settings = settings(
        max_examples=400,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
