"""Wide rounds: verified where they take less time than the narrow rounds that they replace."""

from __future__ import annotations

import pytest

from compiled_mtp.graphs.buckets import RoundShape
from compiled_mtp.plan import StepPlan, StepResult
from compiled_mtp.spec.lookup import WideRounds
from compiled_mtp.spec.policy import DepthPolicy

DEPTH, WIDTH = 3, 15
CLASS = ((1, False), 0)


def timed(wide_s: float, narrow_s: float = 1.0) -> WideRounds:
    """Wide rounds of which one of each kind was timed."""
    record = WideRounds(WIDTH)
    record.record_time(DEPTH, CLASS, narrow_s, is_wide=False)
    record.record_time(DEPTH, CLASS, wide_s, is_wide=True)
    return record


def learn(record: WideRounds, kept: int, count: int, *, is_looked_up: bool = True) -> None:
    for _ in range(count):
        record.record_round(DEPTH, WIDTH, kept, is_looked_up=is_looked_up)


def test_without_times_a_wide_round_is_tried() -> None:
    record = WideRounds(WIDTH)
    assert record.pays(DEPTH, CLASS)
    record.record_time(DEPTH, CLASS, 1.0, is_wide=False)
    assert record.pays(DEPTH, CLASS)


@pytest.mark.parametrize(
    ("kept", "wide_s", "pays"),
    # 15 kept drafts and the bonus token take four rounds of depth 3, 5 take two, and none takes one.
    [(15, 3.9, True), (15, 4.1, False), (5, 1.9, True), (5, 2.1, False), (0, 0.9, True), (0, 1.1, False)],
)
def test_a_wide_round_pays_if_the_rounds_that_it_replaces_take_longer(
    kept: int, wide_s: float, pays: bool
) -> None:
    record = timed(wide_s)
    learn(record, kept, 200)
    assert record.pays(DEPTH, CLASS) is pays


def test_wide_rounds_of_a_chain_replace_one_round() -> None:
    """The host decides a round late: the drafts may be a chain's by then."""
    record = timed(1.5)
    learn(record, 3, 200, is_looked_up=False)
    assert not record.pays(DEPTH, CLASS)


def test_where_wide_rounds_do_not_pay_they_are_tried_ever_less_often() -> None:
    record = timed(5.0)
    learn(record, 15, 200)
    tries = [turn for turn in range(4000) if record.pays(DEPTH, CLASS)]
    assert 0 < len(tries) <= 4000 // 50
    gaps = [later - earlier for earlier, later in zip(tries[::2], tries[2::2], strict=False)]
    assert gaps == sorted(gaps)
    assert tries[1] == tries[0] + 1  # Two at a time: the first may find a chain's drafts.


def test_a_machine_that_becomes_faster_is_noticed() -> None:
    record = timed(5.0)
    learn(record, 15, 200)
    assert not record.pays(DEPTH, CLASS)
    for _ in range(20):
        record.record_time(DEPTH, CLASS, 1.2, is_wide=True)
    assert record.pays(DEPTH, CLASS)


def test_the_depth_learns_nothing_from_looked_up_rounds() -> None:
    """Their tokens say how the text repeats itself, not how well a chain drafts; their times are those of
    more rows.
    """
    seconds = [0.0]
    policies = [DepthPolicy((1, 3), (1, 2), lambda: seconds[0], wide_drafts=WIDTH) for _ in range(2)]
    for step_id in range(60):
        is_looked_up = step_id % 3 == 0
        for policy in policies:
            # The second policy does not see the looked-up rounds.
            if is_looked_up and policy is policies[1]:
                continue
            depth = 3
            verify = WIDTH if is_looked_up else depth
            plan = StepPlan(step_id, "decode", (1,), (1,), RoundShape(verify, depth), num_drafts=depth)
            policy.launch(plan)
            # Only a shorter time shows: others count as load.
            seconds[0] += 0.125 if is_looked_up else 0.5
            new = list(range(16)) if is_looked_up else [1, 2]
            policy.read(StepResult(plan, [new], matches=[[9 if is_looked_up else 0, 0]]))
    for policy in policies:
        policy.controller._learn()
    one, other = (policy.controller._gains.tokens() for policy in policies)
    assert one == other
    one, other = (policy.controller.speeds(*CLASS) for policy in policies)
    assert one == other
    assert one[3] > 0


def test_a_wide_round_whose_drafts_were_a_chain_s_counts_as_one_round() -> None:
    policy = DepthPolicy((DEPTH,), (1, 2), wide_drafts=WIDTH)
    for step_id in range(200):
        plan = StepPlan(step_id, "decode", (1,), (1,), RoundShape(WIDTH, DEPTH), num_drafts=DEPTH)
        policy.launch(plan)
        policy.read(StepResult(plan, [[1, 2]], matches=[[0, 0]]))
    for seconds, is_wide in ((1.0, False), (1.1, True)):
        policy.wide._seconds[CLASS, DEPTH, is_wide] = seconds
    assert not policy.wide.pays(DEPTH, CLASS)


def test_requests_beside_a_looked_up_one_still_teach_the_depth() -> None:
    policy = DepthPolicy((3,), (1, 2), wide_drafts=WIDTH)
    plan = StepPlan(0, "decode", (1, 2), (1, 1), RoundShape(3, 3), num_drafts=3)
    policy.launch(plan)
    policy.read(StepResult(plan, [[1, 2, 3, 4], [5, 6]], matches=[[5, 0], [0, 0]]))
    assert policy.controller._rounds_of == {3: [[[], [5, 6]]]}
