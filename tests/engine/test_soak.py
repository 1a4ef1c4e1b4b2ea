"""Long random traffic: tests that take seconds elsewhere, run for minutes (make soak)."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compiled_mtp.request import SamplingParams
from tests.checkpoints import write_checkpoint
from tests.engine.test_random_traffic import EngineMachine
from tests.engine.test_request_features import MIXES, check_mixes, write_small_checkpoint
from tests.engines import LateCopyStream, collect, make_engine, prompt_of
from tests.scheduler.test_prefix import PrefixMachine, churn
from tests.scheduler.test_pressure import TRAFFIC, run_traffic
from tests.scheduler.test_scheduler import SchedulerMachine
from tests.scheduler.test_traffic import TRAFFIC as EVERYTHING
from tests.scheduler.test_traffic import Traffic


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
    """No request is lost: each has its tokens; every block, slot and host record is free at the end."""

    @given(traffic=TRAFFIC)
    @settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
    def check(traffic: dict[str, Any]) -> None:
        run_traffic(20, traffic)

    check()


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_all_pressures_at_once() -> None:
    @given(traffic=EVERYTHING)
    @settings(max_examples=800, deadline=None, suppress_health_check=list(HealthCheck))
    def check(traffic: dict[str, Any]) -> None:
        Traffic(traffic).run(8)

    check()


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(8))
def test_engines_under_all_pressures_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Every request has the tokens that it has alone, without drafts or cache.

    Chats share beginnings, blocks suffice for one request and a half, copies finish late, and states move to
    the host and back.
    """
    write_checkpoint(tmp_path, hidden_size=64, num_value_heads=1, intermediate_size=64)
    rng, mib = random.Random(seed), 1 << 20
    alone = make_engine(tmp_path, mtp_step=0, max_batch=1, prefix_cache=False, offload_gb=0)
    monkeypatch.setattr("compiled_mtp.cache.moves.CopyStream", LateCopyStream)
    monkeypatch.setattr(
        "compiled_mtp.runner.host_tiers.prefix_tier_bytes", lambda *_: rng.choice([0, 2, 8]) * mib
    )
    engine = make_engine(
        tmp_path,
        mtp_step=rng.choice([0, 1, 3]),
        max_batch=rng.choice([2, 4]),
        max_in_flight=seed % 2,
        num_blocks=rng.choice([18, 24, 32]),
        prefill_chunk=rng.choice([64, 256]),
        offload_gb=rng.choice([0, 0.001, 0.5]),
        prefix_cache_gb=rng.choice([0.0005, 0.002]),
    )
    engine.scheduler._planner.admission.tokens_ahead = rng.choice([0, 64])
    chats: list[list[int]] = [prompt_of(130, 1, 512)]
    for turn in range(15):
        prompts, expected, got = {}, {}, dict[str, list[int]]()
        for index in range(rng.randint(1, 6)):
            name, chat = f"{turn}.{index}", rng.choice(chats)
            kept = chat[: rng.choice([len(chat), rng.randint(0, len(chat))])]
            prompts[name] = [*kept, *prompt_of(rng.randint(1, 60), rng.randint(0, 3), 512)][-220:]
            fields: dict[str, Any] = {"temperature": rng.choice([0.0, 0.9]), "seed": index}
            fields |= {"repetition_penalty": 1.5} if rng.random() < 0.3 else {}
            params = SamplingParams(max_tokens=rng.choice([1, 8, 40]), ignore_eos=True, **fields)
            expected[name] = alone.generate([prompts[name]], params)[0].new_token_ids
            engine.add_request(
                prompt_token_ids=prompts[name],
                params=params,
                request_id=name,
                priority=rng.randint(0, 2),
            )
            collect(got, engine.step())
        aborted = rng.choice(sorted(prompts)) if rng.random() < 0.3 else ""
        while engine.has_unfinished_requests():
            if aborted and engine.scheduler.is_live(aborted) and rng.random() < 0.05:
                engine.abort(aborted)
            collect(got, engine.step())
            engine.scheduler.check_integrity()
        for name, tokens in expected.items():
            own = got.get(name, [])
            assert own == (tokens[: len(own)] if name == aborted else tokens), (turn, name)
        chats = [*chats[-4:], *(prompts[name] + expected[name] for name in prompts)]
    assert engine.stats().blocks_used == 0
    assert engine.stats().prefix_hits >= 5
