"""Long random traffic: what other tests do for seconds, for minutes (make soak)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.test_engine_machine import EngineMachine
from tests.test_engine_requests import MIXES, check_mixes, write_small_checkpoint
from tests.test_prefix import PrefixMachine, churn
from tests.test_scheduler import SchedulerMachine
from tests.test_scheduler_pressure import TRAFFIC, run_traffic


@pytest.mark.soak
@pytest.mark.timeout(3600)
class TestSoak(EngineMachine.TestCase):
    settings = settings(
        max_examples=400,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


@pytest.mark.soak
@pytest.mark.timeout(3600)
class TestSchedulerSoak(SchedulerMachine.TestCase):
    settings = settings(max_examples=10_000, stateful_step_count=40, deadline=None)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_random_mixes(tmp_path: Path) -> None:
    write_small_checkpoint(tmp_path)

    @given(mixes=st.lists(MIXES, min_size=1, max_size=8))
    @settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
    def check(mixes: list[dict[str, Any]]) -> None:
        check_mixes(tmp_path, mixes)

    check()


@pytest.mark.soak
@pytest.mark.timeout(3600)
class TestPrefixSoak(PrefixMachine.TestCase):
    settings = settings(
        max_examples=3000, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
    )


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_lost_over_ten_thousand_requests(seed: int) -> None:
    scheduler = churn(10_000, seed)
    assert scheduler.pool.num_used == 0
    assert scheduler.prefix.num_hits > 1000


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_ten_thousand_requests_on_tiny_pools() -> None:
    """Nothing is lost: every request has its tokens, every block, slot and record is free at the end."""

    @given(traffic=TRAFFIC)
    @settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
    def check(traffic: dict[str, Any]) -> None:
        run_traffic(20, traffic)

    check()
