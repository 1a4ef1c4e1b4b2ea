"""The depth controller against rounds that are simulated from known acceptance and known times."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_mtp.spec.depth import DepthController, context_class, context_span

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
    """Tokens a millisecond over ROUNDS rounds, with the controller or at a fixed depth.

    A round verifies no more drafts than the one before it has left, and takes as long as if it did.
    """
    chance = random.Random(batch)
    total_ms = tokens = 0.0
    left = fixed
    for number in range(ROUNDS):
        p = rate(number)
        depth = fixed if controller is None else controller.choose(batch, 0)
        num_drafts, left = min(left, depth), depth
        # One draw a request, so that every run sees the same text.
        draws = [math.log(1 - chance.random()) / math.log(p) for _ in range(batch)]
        accepted = [min(int(draw), num_drafts) for draw in draws]
        spent = times[depth] * (1 + 0.03 * chance.gauss(0, 1))
        if controller is not None:
            controller.record_round(num_drafts, [[0] * (kept + 1) for kept in accepted])
            controller.record_time(depth, batch, 0, spent / 1e3)
        total_ms += spent
        tokens += sum(kept + 1 for kept in accepted)
    return tokens / total_ms


def make(times: dict[int, float], batch: int) -> DepthController:
    """A controller that knows nothing yet."""
    return DepthController(times)


def knowing(times: dict[int, float]) -> DepthController:
    return DepthController(times, {(depth, 1): ms / 1e3 for depth, ms in times.items()})


@pytest.mark.parametrize("case", TIMES, ids=lambda case: f"{case[0]}-{case[1]}")
@pytest.mark.parametrize("mean_new_tokens", [1.1, 2.1, 2.6, 3.3])
def test_it_is_nearly_as_fast_as_the_best_depth(case: tuple[str, int], mean_new_tokens: float) -> None:
    times, batch, p = TIMES[case], case[1], rate_for(mean_new_tokens)
    best = max(simulate(times, lambda n: p, batch, None, depth) for depth in times)
    controller = make(times, batch)
    assert simulate(times, lambda n: p, batch, controller) >= 0.97 * best
    assert controller.num_probes <= ROUNDS / 100


@pytest.mark.parametrize("case", TIMES, ids=lambda case: f"{case[0]}-{case[1]}")
def test_it_follows_a_text_that_changes(case: tuple[str, int]) -> None:
    times, batch = TIMES[case], case[1]
    good, bad = rate_for(3.3), rate_for(1.1)

    def rate(number: int) -> float:
        return bad if number // 200 % 2 else good

    best = max(simulate(times, rate, batch, None, depth) for depth in times)
    assert simulate(times, rate, batch, make(times, batch)) >= 0.97 * best


@pytest.mark.parametrize(("mean_new_tokens", "least"), [(1.1, 0.94), (2.6, 0.95)])
def test_neighbours_that_hold_up_a_quarter_of_the_rounds_cost_little(
    mean_new_tokens: float, least: float
) -> None:
    times, p = TIMES["4b", 1], rate_for(mean_new_tokens)
    speeds = {depth: sum(p**k for k in range(depth + 1)) / ms for depth, ms in times.items()}
    total_ms = tokens = 0.0
    for seed in range(10):
        chance, controller = random.Random(seed), make(times, 1)
        for number in range(464):
            depth = controller.choose(1, 0)
            kept = next((k for k in range(depth) if chance.random() > p), depth)
            controller.record_round(depth, [[0] * (kept + 1)])
            held_up = 1 + chance.expovariate(0.3) if chance.random() < 0.25 else 1.0
            controller.record_time(depth, 1, 0, times[depth] * held_up * (1 + 0.05 * chance.gauss(0, 1)))
            if number >= 64:
                # What it would have without neighbours.
                total_ms += times[depth]
                tokens += speeds[depth] * times[depth]
    assert tokens / total_ms >= least * max(speeds.values())


def test_a_depth_that_has_become_slow_is_left() -> None:
    times = {0: 1.0, 3: 1.2}
    controller = knowing(times)
    for _ in range(50):
        assert controller.choose(1, 0) == 3
        controller.record_round(3, [[0] * 3])
    for _ in range(200):
        if controller.choose(1, 0) == 3:
            controller.record_time(3, 1, 0, 0.0200)
    assert controller.choose(1, 0) == 0


def test_what_is_known_of_one_context_serves_another() -> None:
    controller = DepthController((0, 3), {(0, 1): 0.001, (3, 1): 0.002})
    controller.record_time(0, 1, 5, 0.003)
    # Depth 3 was never timed there: it is taken to slow down as depth 0 has.
    known, told = controller.speeds(1, 0)[3], controller.speeds(1, 5)[3]
    assert told / known == pytest.approx(1 / 3, rel=0.2)


def test_one_time_beyond_reason_moves_little() -> None:
    controller = DepthController((0, 1), {(0, 1): 0.001, (1, 1): 0.0012})
    controller.choose(1, 0)
    before = controller.speeds(1, 0)[0]
    controller.record_time(0, 1, 0, 10.0)
    for _ in range(6):
        controller.choose(1, 0)
    assert before > controller.speeds(1, 0)[0] > 0.85 * before


def test_context_classes_double() -> None:
    lengths = (1, 4096, 4097, 8192, 8193, 16384, 131072)
    assert [context_class(n) for n in lengths] == [0, 0, 1, 1, 2, 2, 5]
    spans = [(-1, 4096)] * 2 + [(4096, 8192)] * 2 + [(8192, 16384)] * 2 + [(65536, 131072)]
    assert [context_span(n) for n in lengths] == spans


def test_a_depth_that_becomes_ready_is_used() -> None:
    controller = DepthController((0, 1), {(d, 1): 0.01 for d in (0, 1, 3)})
    for _ in range(20):
        assert controller.choose(1, 0) == 1
        controller.record_round(1, [[0] * 2])
    controller.add_depth(3)
    for _ in range(60):
        depth = controller.choose(1, 0)
        controller.record_round(depth, [[0] * (depth + 1)])
    assert depth == 3


@pytest.mark.parametrize("depths", [(), (-1, 2)])
def test_refuses(depths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="depths must be numbers from 0 on"):
        DepthController(depths, {})


@given(
    depths=st.sets(st.integers(0, 7), min_size=1, max_size=4),
    seed=st.integers(0, 99),
    most_kept=st.integers(0, 7),
)
@settings(max_examples=25, deadline=None)
def test_no_more_than_a_hundredth_of_the_rounds_are_probes(
    depths: set[int], seed: int, most_kept: int
) -> None:
    """Whatever is kept and however long rounds take."""
    chance = random.Random(seed)
    controller = DepthController(depths)
    for number in range(1, 400):
        depth = controller.choose(1, 0)
        assert depth in depths
        if controller.reason == "probe":
            assert depth == min(depths - {0})
        assert controller.num_probes <= number / 100
        controller.record_round(depth, [[0] * (1 + chance.randint(0, min(depth, most_kept)))])
        controller.record_time(depth, 1, 0, (1 + depth) * chance.uniform(0.001, 0.002))


def test_with_bad_text_it_probes_in_pairs_of_rounds() -> None:
    controller = DepthController((0, 1), {(0, 1): 0.010, (1, 1): 0.014})
    reasons = []
    for _ in range(2000):
        depth = controller.choose(1, 0)
        reasons.append(controller.reason)
        controller.record_round(depth, [[0]])
    probes = [index for index, reason in enumerate(reasons) if reason == "probe"]
    assert len(probes) == controller.num_probes >= 8
    assert all(second == first + 1 for first, second in zip(probes[::2], probes[1::2], strict=True))


def test_one_time_far_too_long_does_not_hide_the_shallower_depths() -> None:
    """A line through a slow depth 3 and a true depth 2 would say that depth 0 takes less than no time."""
    controller = DepthController((0, 1, 2, 3, 5))
    for _ in range(3):
        controller.record_time(3, 8, 0, 0.040)
    for _ in range(20):
        controller.record_time(2, 8, 0, 0.004)
        controller.record_round(2, [[1]] * 8)
    speeds = controller.speeds(8, 0)
    assert min(speeds.values()) > 0
    for _ in range(40):
        depth = controller.choose(8, 0)
        controller.record_time(depth, 8, 0, 0.003 + 0.0005 * depth)
        controller.record_round(depth, [[1]] * 8)
    assert controller.depth == 0
