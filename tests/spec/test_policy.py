"""What the depth policy learns from plans and results: which times count as a round's."""

from __future__ import annotations

from typing import Any

import pytest

from compiled_mtp.graphs.buckets import RoundShape
from compiled_mtp.plan import Copy, Draft, Location, StepPlan, StepResult
from compiled_mtp.spec.policy import DepthPolicy


class Rig:
    """A policy, a clock, and what the controller recorded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.policy = DepthPolicy((0, 3), (1, 2, 8), clock=lambda: self.now_s)
        self.times: list[tuple[Any, ...]] = []
        self.rounds: list[tuple[Any, ...]] = []
        monkeypatch.setattr(self.policy.controller, "record_time", lambda *a: self.times.append(a))
        monkeypatch.setattr(self.policy.controller, "record_round", lambda *a: self.rounds.append(a))

    def plan(self, step_id: int, kind: Any = "decode", after_s: float = 0.0, **fields: Any) -> StepPlan:
        self.now_s += after_s
        depth = {"shape": RoundShape(3, 3), "num_drafts": 3}
        plan = StepPlan(step_id, kind, (1, 2, 3), (0, 0, 0), **(depth | fields))
        self.policy.launch(plan)
        return plan

    def read(self, plan: StepPlan, after_s: float, **fields: Any) -> None:
        self.now_s += after_s
        self.policy.read(StepResult(plan, **({"token_ids": [[1], [1, 2], []]} | fields)))

    @property
    def seconds(self) -> list[float]:
        return [round(seconds, 6) for *_, seconds in self.times]


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch)


def test_a_rounds_time_runs_from_its_launch_if_nothing_was_in_flight(rig: Rig) -> None:
    for step_id in range(3):
        # The caller's pause before it does not count.
        rig.read(rig.plan(step_id, after_s=5.0), after_s=0.02)
    assert rig.seconds == [0.02, 0.02, 0.02]
    assert {(depth, bucket, context) for depth, bucket, context, _ in rig.times} == {(3, (8, False), 0)}
    assert rig.rounds[0] == (3, [[1], [1, 2], []])


def test_with_a_launch_in_flight_it_runs_from_the_result_before(rig: Rig) -> None:
    plans = [rig.plan(0)]
    for step_id in range(1, 4):
        plans.append(rig.plan(step_id, after_s=0.001))
        rig.read(plans[-2], after_s=0.01)
    assert rig.seconds == [0.011, 0.011, 0.011]
    # Also before and after a prompt chunk in flight, unless its launch takes longer than the round.
    for step_id, is_late in ((4, True), (6, False)):
        chunk = rig.plan(step_id, "prefill", after_s=0.004)
        rig.read(plans[-1], after_s=0.08, is_late=is_late)
        plans.append(rig.plan(step_id + 1, after_s=0.001))
        rig.read(chunk, after_s=0.5)
    rig.read(plans[-1], after_s=0.01)
    assert rig.seconds == [0.011, 0.011, 0.011, 0.084, 0.01]
    assert len(rig.rounds) == 6


def test_a_late_result_before_a_prompt_chunk_has_the_devices_time(rig: Rig) -> None:
    """With many streams a chunk follows nearly every round, and its launch takes the host long."""
    plans = [rig.plan(0)]
    for step_id in range(1, 7, 2):
        chunk = rig.plan(step_id, "prefill", after_s=0.03)
        rig.read(plans[-1], after_s=0.001, is_late=True, device_s=0.016)
        plans.append(rig.plan(step_id + 1, after_s=0.001))
        rig.read(chunk, after_s=0.05)
    assert rig.seconds == [0.016, 0.016, 0.016]


def test_two_phases_are_timed_together_and_apart_from_whole_rounds(rig: Rig) -> None:
    rig.read(rig.plan(0, "verify"), after_s=0.01)
    rig.read(rig.plan(1, "accept", after_s=0.004), after_s=0.006)
    assert rig.seconds == [0.02]
    assert rig.times[0][1] == (8, True)
    # With a chunk between the phases the time is not the round's.
    rig.read(rig.plan(2, "verify"), after_s=0.01)
    rig.read(rig.plan(3, "prefill"), after_s=0.5)
    rig.read(rig.plan(4, "accept"), after_s=0.006)
    assert len(rig.times) == 1
    assert len(rig.rounds) == 2


def test_rounds_with_other_work_are_not_timed(rig: Rig) -> None:
    copy = Copy(0, Location("slot", 1), Location("slot", 2))
    rig.read(rig.plan(0, moves=(copy,)), after_s=0.02)
    rig.read(rig.plan(1, catches_up=True), after_s=0.02)
    rig.read(rig.plan(2), after_s=0.02, error="the device is on fire")
    assert rig.times == []
    assert len(rig.rounds) == 2
    # At depth 0 a catch-up is part of the depth's cost.
    rig.read(rig.plan(3, catches_up=True, shape=RoundShape(0, 0), num_drafts=0), after_s=0.02)
    assert rig.seconds == [0.02]


def test_after_a_late_result_a_rounds_time_is_not_too_short(rig: Rig) -> None:
    """The round had begun earlier, at an unknown time, but not before its launch."""
    plans = [rig.plan(0), rig.plan(1)]
    rig.read(plans[0], after_s=0.03, is_late=True)
    plans.append(rig.plan(2))
    rig.read(plans[1], after_s=0.01)
    plans.append(rig.plan(3))
    rig.read(plans[2], after_s=0.02)
    assert rig.seconds == [0.03, 0.04, 0.02]
    # If the device always finishes first, the host's time of a round counts too.
    plans.append(rig.plan(4))
    rig.read(plans[3], after_s=0.025, is_late=True)
    plans.append(rig.plan(5))
    rig.read(plans[4], after_s=0.025, is_late=True)
    assert rig.seconds[3:] == [0.025, 0.025]


def test_after_a_late_result_the_time_of_two_phases_is_not_too_short(rig: Rig) -> None:
    before, verify = rig.plan(0), rig.plan(1, "verify")
    rig.read(before, after_s=0.03, is_late=True)
    # The verify's result is late, and the accept's is not.
    rig.read(verify, after_s=0.01, is_late=True)
    rig.read(rig.plan(2, "accept"), after_s=0.01)
    assert rig.seconds == [0.03, 0.05]


def test_launches_that_were_dropped_are_forgotten(rig: Rig) -> None:
    rig.plan(0)
    rig.read(rig.plan(1, "verify"), after_s=0.01)
    rig.policy.forget_launches()
    rig.read(rig.plan(2, "accept"), after_s=0.01)
    assert rig.times == []
    assert rig.policy._launched_s == {}


def test_first_tokens_ask_without_counting_and_a_depth_that_becomes_ready_is_counted() -> None:
    policy = DepthPolicy((3,), (1, 2))
    assert policy.choose(0, 0, is_two_phase=False) == 3
    assert policy.choose(2, 10_000, is_two_phase=False) == 3
    assert policy.rounds() == {3: {"best": 0, "probe": 0, "retry": 0, "only": 1}}
    policy.add_depths((0,))
    policy.choose(1, 10, is_two_phase=True)
    assert policy.rounds()[0] == {"best": 0, "probe": 0, "retry": 0, "only": 0}
    assert policy.rounds()[3]["best"] == 1


def test_replayed_tokens_do_not_count_as_drafts(rig: Rig) -> None:
    moves = (Draft(2, (5, 6)),)
    rig.read(rig.plan(0, moves=moves), after_s=0.01)
    rig.read(rig.plan(1, "verify", moves=moves), after_s=0.01, token_ids=[[], [], []])
    rig.read(rig.plan(2, "accept"), after_s=0.01)
    rig.read(rig.plan(3), after_s=0.01)
    assert [tokens for _, tokens in rig.rounds] == [[[1], []], [[1], []], [[1], [1, 2], []]]
