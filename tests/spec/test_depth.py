"""The depth controller alone, with rounds of known acceptance and known times."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_mtp.spec import depth as depth_module
from compiled_mtp.spec.depth import DepthController, context_class, context_span
from tests.spec.machine import DEPTHS, MACHINES, rate_for


def knowing(times: dict[int, float]) -> DepthController:
    """Return a controller that has often measured rounds of these milliseconds, at batch 1."""
    controller = DepthController(times)
    for depth, ms in times.items():
        time_rounds(controller, depth, ms)
    return controller


def time_rounds(controller: DepthController, depth: int, ms: float) -> None:
    """Record six measurements, each of three times, while another depth is in use."""
    in_use, controller.depth = controller.depth, -1
    for _ in range(18):
        controller.record_time(depth, 1, 0, ms / 1e3)
    controller.depth = in_use


@pytest.mark.parametrize(("mean_new_tokens", "least"), [(1.1, 0.94), (2.6, 0.95)])
def test_other_load_in_a_quarter_of_the_rounds_costs_little(mean_new_tokens: float, least: float) -> None:
    times, p = {depth: MACHINES["4b"][1][depth] for depth in DEPTHS}, rate_for(mean_new_tokens)
    speeds = {depth: sum(p**k for k in range(depth + 1)) / ms for depth, ms in times.items()}
    total_ms = tokens = 0.0
    for seed in range(10):
        chance, controller = random.Random(seed), DepthController(times)
        for number in range(464):
            depth = controller.choose(1, 0)
            kept = next((k for k in range(depth) if chance.random() > p), depth)
            controller.record_round(depth, [[0] * (kept + 1)])
            held_up = 1 + chance.expovariate(0.3) if chance.random() < 0.25 else 1.0
            controller.record_time(depth, 1, 0, times[depth] * held_up * (1 + 0.05 * chance.gauss(0, 1)))
            if number >= 64:
                # The result without other load.
                total_ms += times[depth]
                tokens += speeds[depth] * times[depth]
    assert tokens / total_ms >= least * max(speeds.values())


def test_a_text_that_repeats_in_step_with_its_rounds_does_not_mislead_it() -> None:
    """Depths 3 and 5 give as many tokens, and 5 takes longer; by draft number alone each looks worse than
    the other while it runs."""
    times, text = {0: 20.0, 1: 24.5, 2: 29.0, 3: 32.5, 5: 46.0}, [0] + [5] * 6
    total_ms = tokens = 0.0
    for seed in range(6):
        chance, controller, at = random.Random(seed), DepthController(times), 0
        for number in range(400):
            depth = controller.choose(1, 0)
            kept = min(depth, text[at % 7])
            controller.record_round(depth, [[0] * (kept + 1)])
            controller.record_time(depth, 1, 0, times[depth] * (1 + 0.02 * chance.gauss(0, 1)) / 1e3)
            at += kept + 1
            if number >= 64:
                tokens += kept + 1
                total_ms += times[depth]
    # A round of depth 3 gives 3.5 tokens.
    assert tokens / total_ms >= 0.9 * 3.5 / times[3]


def test_a_depth_that_has_become_slow_is_left() -> None:
    times = {0: 1.0, 3: 1.2}
    controller = knowing(times)
    for _ in range(30):
        assert controller.choose(1, 0) == 3
        controller.record_round(3, [[0] * 3])
    for _ in range(200):
        depth = controller.choose(1, 0)
        controller.record_time(depth, 1, 0, 0.0200 if depth == 3 else 0.001)
    assert controller.choose(1, 0) == 0


def test_what_is_known_of_one_context_serves_another() -> None:
    controller = knowing({0: 1.0, 3: 2.0})
    controller.record_time(0, 1, 5, 0.003)
    # Depth 3 was never timed there: the controller assumes that it slows down as depth 0 has.
    known, other = controller.speeds(1, 0)[3], controller.speeds(1, 5)[3]
    assert other / known == pytest.approx(1 / 3, rel=0.2)


def test_one_time_beyond_reason_moves_little() -> None:
    controller = knowing({0: 1.0, 1: 1.2})
    controller.choose(1, 0)
    before = controller.speeds(1, 0)[0]
    controller.record_time(0, 1, 0, 10.0)
    for _ in range(6):
        controller.choose(1, 0)
    assert controller.speeds(1, 0)[0] == pytest.approx(before, rel=0.01)


def test_context_classes_double() -> None:
    lengths = (1, 4096, 4097, 8192, 8193, 16384, 131072)
    assert [context_class(n) for n in lengths] == [0, 0, 1, 1, 2, 2, 5]
    spans = [(-1, 4096)] * 2 + [(4096, 8192)] * 2 + [(8192, 16384)] * 2 + [(65536, 131072)]
    assert [context_span(n) for n in lengths] == spans


def test_a_depth_that_becomes_ready_is_used() -> None:
    controller = knowing({0: 10.0, 1: 10.0})
    time_rounds(controller, 3, 10.0)
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
    with pytest.raises(ValueError, match="depths must be numbers of at least 0"):
        DepthController(depths)


@given(
    depths=st.sets(st.integers(0, 7), min_size=1, max_size=4),
    seed=st.integers(0, 99),
    most_kept=st.integers(0, 7),
)
@settings(max_examples=25, deadline=None)
def test_no_more_than_a_hundredth_of_the_rounds_are_probes(
    depths: set[int], seed: int, most_kept: int
) -> None:
    """For any acceptance and any times of rounds."""
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
    controller = knowing({0: 10.0, 1: 14.0})
    reasons = []
    for _ in range(2000):
        depth = controller.choose(1, 0)
        reasons.append(controller.reason)
        controller.record_round(depth, [[0]])
    probes = [index for index, reason in enumerate(reasons) if reason == "probe"]
    assert len(probes) == controller.num_probes >= 8
    assert all(second == first + 1 for first, second in zip(probes[::2], probes[1::2], strict=True))


def test_one_time_far_too_long_does_not_hide_the_shallower_depths() -> None:
    """A line through a slow depth 3 and a true depth 2 would give depth 0 a negative time."""
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


@pytest.mark.parametrize("worst_ms", [3.0, 9.0])
def test_a_time_that_was_measured_wrongly_is_measured_again(worst_ms: float) -> None:
    """Depth 2 is the best, but every time of its first measurement was slowed down."""
    times = {1: 1.0, 2: 1.05}
    controller, reasons = knowing({1: 1.0, 2: worst_ms}), []
    for _ in range(400):
        depth = controller.choose(1, 0)
        reasons.append(controller.reason)
        controller.record_round(depth, [[0] * (depth + 1)])
        controller.record_time(depth, 1, 0, times[depth] * 1e-3)
    assert reasons.count("retry") >= 3
    first = reasons.index("retry")
    assert reasons[first : first + 4] == ["retry"] * 3 + ["best"]
    assert controller.depth == 2


def test_a_time_far_too_short_misleads_until_the_next_retry_alone() -> None:
    """A correction of the depth that seemed fast does not change the others."""
    times, p = {1: 22.0, 2: 24.1, 3: 26.0, 5: 30.6}, rate_for(2.6)
    for seed in range(4):
        chance, rounds = random.Random(seed), dict.fromkeys(times, 0)
        controller = knowing(times | {2: 0.8 * times[2]})
        for _ in range(250):
            depth = controller.choose(1, 0)
            rounds[depth] += 1
            kept = [next((k for k in range(depth) if chance.random() > p), depth) for _ in range(32)]
            controller.record_round(depth, [[0] * (count + 1) for count in kept])
            controller.record_time(depth, 1, 0, times[depth] / 1e3)
        # As fast as depth 3, or a twelfth slower.
        assert rounds[1] + rounds[2] <= 60, seed


def test_a_measurement_has_no_times_from_before_the_depth_came_into_use_again() -> None:
    controller = knowing({1: 10.0, 3: 12.0})
    for _ in range(2):
        controller.record_time(1, 1, 0, 0.001)
    before = controller.speeds(1, 0)[1]
    while controller.choose(1, 0) != 1:
        controller.record_round(3, [[0] * 4])
    for _ in range(3):
        controller.record_time(1, 1, 0, 0.010)
    assert controller.speeds(1, 0)[1] == pytest.approx(before, rel=0.2)


def test_retries_of_a_settled_choice_become_rare() -> None:
    controller = knowing({1: 10.0, 2: 11.0, 3: 20.0})
    at: dict[int, list[int]] = {1: [], 3: []}
    for number in range(6000):
        depth = controller.choose(1, 0)
        if controller.reason == "retry":
            at[depth].append(number)
        controller.record_round(depth, [[0] * (min(depth, 2) + 1)])
        controller.record_time(depth, 1, 0, {1: 0.010, 2: 0.011, 3: 0.02}[depth])
    # Three rounds of each neighbour in turn.
    starts = sorted(at[1][::3] + at[3][::3])
    assert controller.depth == 2
    assert abs(len(at[1]) - len(at[3])) <= 3
    assert len(at[1]) + len(at[3]) <= 30
    gaps = [later - earlier for earlier, later in pairwise(starts)]
    assert gaps == sorted(gaps)
    assert 30 <= starts[0] <= 40
    assert 1020 <= gaps[-1] <= 1040


@pytest.mark.parametrize("slow_ms", [30.0, 90.0])
def test_retries_lose_at_most_a_hundredth_and_a_round(
    slow_ms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often retries are due."""
    monkeypatch.setattr(depth_module, "_LAST_RETRY", depth_module._FIRST_RETRY)
    controller, lost = knowing({1: 10.0, 3: slow_ms}), 0.0
    for number in range(1000):
        depth = controller.choose(1, 0)
        if controller.reason == "retry":
            lost += min(1 - 10.0 / slow_ms, 0.5)
        # At first it underestimates its loss a little.
        assert lost <= 1.5 * (1 + 0.01 * number)
        controller.record_round(depth, [[0] * 2])
        controller.record_time(depth, 1, 0, {1: 10.0, 3: slow_ms}[depth] / 1e3)
    assert lost > 8


def test_the_bonus_of_a_depth_that_cannot_be_timed_ends() -> None:
    """Prompts between all rounds: an untried depth counts as faster than estimated only for a while."""
    controller = DepthController((0, 1))
    time_rounds(controller, 0, 10.0)
    untimed = [controller.choose(1, 0) for _ in range(40)]
    assert untimed[:2] == [1, 1]
    before = controller.speeds(1, 0)[1]
    controller.record_time(0, 1, 0, 0.010)
    assert controller.speeds(1, 0)[1] == pytest.approx(before, rel=0.01)
    fresh = DepthController((0, 1))
    time_rounds(fresh, 0, 10.0)
    assert before == pytest.approx(0.93 * fresh.speeds(1, 0)[1], rel=0.01)


def test_fewer_drafts_are_never_taken_to_be_slower() -> None:
    controller = knowing({1: 40.0, 3: 10.0})
    controller.record_round(3, [[0]] * 60)
    controller.choose(1, 0)
    speeds = controller.speeds(1, 0)
    # At most as long as depth 3 takes, for nearly as many tokens.
    assert speeds[1] > 0.8 * speeds[3]
