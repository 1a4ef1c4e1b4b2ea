"""The depth controller against rounds that are simulated from known acceptance and known times."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from compiled_mtp.spec.depth import DepthController, context_class

# Milliseconds a round by depth: a released 4B and 27B, one request and 32.
TIMES = {
    ("27b", 1): {0: 12.97, 1: 13.9, 2: 14.75, 3: 15.6, 5: 17.3},
    ("4b", 1): {0: 2.56, 1: 2.97, 2: 3.37, 3: 3.76, 5: 4.55},
    ("27b", 32): {0: 17.6, 1: 20.5, 2: 24.0, 3: 28.0, 5: 38.0},
    ("4b", 32): {0: 4.6, 1: 5.4, 2: 6.4, 3: 7.5, 5: 10.5},
}
ROUNDS = 2000


def rate_for(mean_new_tokens: float) -> float:
    """The acceptance rate at which a round of depth 3 gives so many tokens."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**k for k in range(4)) < mean_new_tokens else (low, middle)
    return low


def simulate(
    times: dict[int, float],
    rate: Callable[[int], float],
    batch: int,
    controller: DepthController | None,
    fixed: int = 0,
) -> float:
    """Tokens a millisecond over ROUNDS rounds, with the controller or at a fixed depth."""
    chance = random.Random(batch)
    total_ms = tokens = 0.0
    verified = 0
    for number in range(ROUNDS):
        p = rate(number)
        accepted = []
        for _ in range(batch):
            kept = 0
            while kept < verified and chance.random() < p:
                kept += 1
            accepted.append(kept)
        drafted = fixed if controller is None else controller.choose(batch, 512)
        # Half of what a depth costs more is the wider verify, half the drafts.
        spent = (times[verified] + times[drafted]) / 2 * (1 + 0.03 * chance.gauss(0, 1))
        if controller is not None:
            controller.record_round(verified, accepted)
            if verified == drafted:
                controller.record_time(drafted, batch, 512, spent / 1e3)
        total_ms += spent
        tokens += sum(kept + 1 for kept in accepted)
        verified = drafted
    return tokens / total_ms


def make(times: dict[int, float], batch: int) -> DepthController:
    return DepthController(times, {(depth, batch): ms / 1e3 for depth, ms in times.items()})


@pytest.mark.parametrize("case", TIMES, ids=lambda case: f"{case[0]}-{case[1]}")
@pytest.mark.parametrize("mean_new_tokens", [1.1, 2.1, 2.6, 3.3])
def test_it_is_nearly_as_fast_as_the_best_depth(case: tuple[str, int], mean_new_tokens: float) -> None:
    times, batch, p = TIMES[case], case[1], rate_for(mean_new_tokens)
    best = max(simulate(times, lambda n: p, batch, None, depth) for depth in times)
    controller = make(times, batch)
    assert simulate(times, lambda n: p, batch, controller) >= 0.97 * best
    assert controller.num_probes <= ROUNDS / 100
    assert sum(controller.rounds_by_depth.values()) == ROUNDS


@pytest.mark.parametrize("case", TIMES, ids=lambda case: f"{case[0]}-{case[1]}")
def test_it_follows_a_text_that_changes(case: tuple[str, int]) -> None:
    times, batch = TIMES[case], case[1]
    good, bad = rate_for(3.3), rate_for(1.1)

    def rate(number: int) -> float:
        return bad if number // 200 % 2 else good

    best = max(simulate(times, rate, batch, None, depth) for depth in times)
    assert simulate(times, rate, batch, make(times, batch)) >= 0.97 * best


def test_a_depth_that_has_become_slow_is_left() -> None:
    times = {0: 1.0, 3: 1.2}
    controller = make(times, 1)
    for _ in range(50):
        assert controller.choose(1, 512) == 3
        controller.record_round(3, [2])
    for _ in range(200):
        if controller.choose(1, 512) == 3:
            controller.record_time(3, 1, 512, 0.0100)
    assert controller.choose(1, 512) == 0


def test_what_is_known_of_one_context_serves_another() -> None:
    controller = DepthController((0, 3), {(0, 1): 0.001, (3, 1): 0.002})
    controller.record_time(0, 1, 100_000, 0.003)
    # Depth 3 was never timed there: it is taken to slow down as depth 0 has.
    ratio = controller.speed(3, 1, 100_000) / controller.speed(3, 1, 512)
    assert ratio == pytest.approx(1 / 3)


def test_one_time_beyond_reason_moves_little() -> None:
    controller = DepthController((0,), {(0, 1): 0.001})
    before = controller.speed(0, 1, 512)
    controller.record_time(0, 1, 512, 10.0)
    assert controller.speed(0, 1, 512) > 0.85 * before


def test_context_classes_double() -> None:
    assert [context_class(n) for n in (1, 4096, 4097, 8192, 8193, 16384, 131072)] == [0, 0, 1, 1, 2, 2, 5]


def test_a_depth_that_becomes_ready_is_used() -> None:
    controller = DepthController((0, 1), {(d, 1): 0.01 for d in (0, 1, 3)})
    for _ in range(20):
        assert controller.choose(1, 512) == 1
        controller.record_round(1, [1])
    controller.add_depth(3)
    for _ in range(60):
        depth = controller.choose(1, 512)
        controller.record_round(depth, [depth])
    assert depth == 3


@pytest.mark.parametrize("depths", [(), (-1, 2)])
def test_refuses(depths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="depths must be numbers from 0 on"):
        DepthController(depths, {})
