"""The depth policy finds the best depth of simulated machines within about 60 rounds, for any text."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import pytest

from tests.spec.machine import MACHINES, MANY, Machine, World, rate_for

WARM, ROUNDS, LEAST = 64, 200, 0.97
GOOD, BAD = rate_for(3.3), rate_for(1.1)
CASES = [(name, batch) for name in MACHINES for batch in (1, 8, 32)]


def over_best(
    case: tuple[str, int], rate: Callable[[int, int], float], rounds: int = ROUNDS, **fields: Any
) -> float:
    """Return throughput relative to the best fixed depth, the mean of two texts."""
    name, batch = case
    world = World(MACHINES[name], rate, batch, **fields)
    return statistics.mean(Machine(world, seed).run(WARM, rounds) for seed in range(2))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}")
@pytest.mark.parametrize("mean_new_tokens", [1.1, 2.1, 2.6, 3.3])
def test_it_is_nearly_as_fast_as_the_best_depth(case: tuple[str, int], mean_new_tokens: float) -> None:
    rate = rate_for(mean_new_tokens)
    assert over_best(case, lambda number, request: rate) >= LEAST


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("mean_new_tokens", [1.1, 2.6, 3.3])
def test_many_requests_are_as_fast_as_the_best_depth_in_the_long_run(
    name: str, mean_new_tokens: float
) -> None:
    rate = rate_for(mean_new_tokens)
    assert over_best((name, 32), lambda number, request: rate, rounds=600) >= 0.98


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def test_it_follows_a_text_that_changes_every_200_rounds(case: tuple[str, int]) -> None:
    assert over_best(case, lambda number, request: BAD if number // 200 % 2 else GOOD, rounds=600) >= 1.0


@pytest.mark.parametrize("name", MANY)
@pytest.mark.parametrize("batch", [64, 256])
def test_rounds_that_wait_for_tensor_cores_have_fewer_drafts(name: str, batch: int) -> None:
    """A dense model drafts 1 or 2 tokens with 256 requests, a mixture still 5."""
    rate = rate_for(2.6)
    prompts = {"chunk_ms": 1.0, "prompt_ms": 20.0}
    machine = Machine(World(MANY[name], lambda number, request: rate, batch, **prompts), seed=0)
    assert machine.run(WARM + batch, ROUNDS) >= LEAST
    best = min(machine.fixed_ms, key=machine.fixed_ms.__getitem__)
    usual = statistics.mode(machine.depths)
    assert abs(usual - best) <= 1 or name == "35b-a3b"
    assert usual in ({"35b-a3b": (3, 5)}.get(name) or ((1, 2) if batch == 256 else (2, 3)))


@pytest.mark.parametrize("mean_new_tokens", [1.1, 2.6])
def test_requests_that_come_and_go_do_not_mislead_it(mean_new_tokens: float) -> None:
    """A prompt is in flight during most rounds, so few are timed."""
    rate = rate_for(mean_new_tokens)
    assert over_best(("4b", 32), lambda number, request: rate, tokens=150) >= LEAST


def test_slow_rounds_do_not_mislead_it() -> None:
    assert over_best(("4b", 1), lambda number, request: BAD, hiccups=0.25) >= 0.95


def test_results_that_are_read_late_do_not_mislead_it() -> None:
    """The next round seems too short, and the least of several times counts."""
    rate = rate_for(2.1)
    late = {"pauses": 0.3, "late_ms": 4.0}
    assert over_best(("27b", 32), lambda number, request: rate, rounds=600, **late) >= 0.985
