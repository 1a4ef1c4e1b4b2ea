"""Moves, several depths, two-phase rounds, logits that are not finite: same tokens, and one owner each."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest

from compiled_mtp.plan import Copy, Release, StepPlan
from compiled_mtp.request import Request, RequestOutput, RoutedExperts
from compiled_mtp.scheduler import Scheduler
from compiled_mtp.scheduler.phases import TRANSITIONS, RequestPhase, check_transition
from tests.fake_runner import FakeRunner
from tests.scheduling import (
    expected_tokens,
    make_request,
    make_scheduler,
    phase_of,
    preempt_one,
    step,
    stream,
)

HOST = {"host_records": 2, "host_blocks": 24}


def start(
    scheduler: Scheduler, runner: FakeRunner, names: str = "abc", max_tokens: int = 24
) -> tuple[dict[str, Request], list[RequestOutput]]:
    """Requests that decode, and their outputs so far."""
    requests = {n: make_request(n, 5 + i, max_tokens, i, ignore_eos=True) for i, n in enumerate(names)}
    for request in requests.values():
        scheduler.add(request)
    outputs: list[RequestOutput] = []
    while len(scheduler.running) < len(names):
        outputs += step(scheduler, runner)
    return requests, outputs


def check_tokens(requests: dict[str, Request], outputs: list[RequestOutput]) -> None:
    for name, request in requests.items():
        tokens = [token for o in outputs if o.request_id == name for token in o.new_token_ids]
        assert tokens == expected_tokens(request, 40)


def copies(plans: list[StepPlan]) -> list[tuple[StepPlan, Copy]]:
    return [(plan, move) for plan in plans for move in plan.moves if isinstance(move, Copy)]


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("copy_delay", [0, 2])
def test_a_request_goes_to_the_host_and_comes_back_into_other_blocks(delay: int, copy_delay: int) -> None:
    scheduler = make_scheduler(max_in_flight=delay, num_blocks=40, **HOST)
    runner = FakeRunner(scheduler, delay, copy_delay=copy_delay)
    requests, outputs = start(scheduler, runner)
    used = scheduler.pool.num_used
    assert preempt_one(scheduler, "b")
    while phase_of(scheduler, "b") is not RequestPhase.OFFLOADED:
        outputs += step(scheduler, runner)
    assert scheduler.pool.num_used < used
    outputs += stream(scheduler, runner)
    check_tokens(requests, outputs)
    assert [copy.source.tier for _, copy in copies(runner.plans)] == ["slot", "host"]
    assert all(copy.blocks for _, copy in copies(runner.plans))


@pytest.mark.parametrize("delay", [0, 1])
def test_with_copies_alone_outstanding_a_plan_that_launches_nothing_waits_for_them(delay: int) -> None:
    scheduler = make_scheduler(max_in_flight=delay, **HOST)
    runner = FakeRunner(scheduler, delay, copy_delay=99)
    requests, outputs = start(scheduler, runner, "a")
    assert preempt_one(scheduler, "a")
    while phase_of(scheduler, "a") is not RequestPhase.OFFLOADED:
        outputs += step(scheduler, runner)
        assert len(runner.plans) < 20
    assert runner.plans[-1].kind == "move"
    outputs += stream(scheduler, runner)
    check_tokens(requests, outputs)


def test_the_last_result_of_an_offloaded_request_is_read_and_may_end_it() -> None:
    scheduler = make_scheduler(max_in_flight=1, **HOST)
    runner = FakeRunner(scheduler, 1, accept=3)
    scheduler.add(request := make_request("a", 5, 5, 1, ignore_eos=True))
    outputs = [output for _ in range(2) for output in step(scheduler, runner)]
    assert preempt_one(scheduler, "a")
    outputs += stream(scheduler, runner)
    check_tokens({"a": request}, outputs)
    assert outputs[-1].finish_reason == "length"
    assert copies(runner.plans) == []


@pytest.mark.parametrize("steps", range(4))
@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("kind", ["offload", "resume"])
def test_a_request_aborted_during_its_copy_keeps_both_locations_until_the_copy_is_done(
    steps: int, delay: int, kind: str
) -> None:
    scheduler = make_scheduler(max_in_flight=delay, max_batch=4, num_blocks=60, **HOST)
    runner = FakeRunner(scheduler, delay, copy_delay=4)
    requests, outputs = start(scheduler, runner)
    assert preempt_one(scheduler, "b")
    if kind == "resume":
        (scheduled,) = scheduler._live.choices["b"]
        while scheduled.phase is not RequestPhase.OFFLOADED or scheduled.transfer is None:
            outputs += step(scheduler, runner)
    for _ in range(steps):
        outputs += step(scheduler, runner)
    scheduler.abort("b")
    scheduler.check_integrity()
    # A new request must not get what the copy still reads or writes: the runner checks it.
    requests["d"] = make_request("d", 9, 12, 9, ignore_eos=True)
    scheduler.add(requests["d"])
    outputs += stream(scheduler, runner)
    del requests["b"]
    check_tokens(requests, outputs)
    while runner.copies:
        step(scheduler, runner)
    assert scheduler.pool.num_used == scheduler._resources.host_pool.num_used == 0


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("delay", [0, 1])
def test_a_lost_plan_ends_the_requests_whose_copies_it_carried(delay: int, is_late: bool) -> None:
    scheduler = make_scheduler(max_in_flight=delay, **HOST)
    runner = FakeRunner(scheduler, delay)
    _, outputs = start(scheduler, runner)
    assert preempt_one(scheduler, "b")
    is_lost = False
    while not is_lost:
        plan = scheduler.schedule()
        is_lost = plan is not None and bool(copies([plan]))
        runner.fail_next, runner.lose_next = is_lost and is_late, is_lost and not is_late
        scheduler.update(runner.run(plan))
        scheduler.check_integrity()
        outputs += scheduler.take_outputs()
    outputs += stream(scheduler, runner)
    reasons = {o.request_id: o.finish_reason for o in outputs if o.finish_reason}
    assert reasons["b"] == "error"
    assert scheduler.pool.num_used == scheduler._resources.host_pool.num_used == 0


def test_after_a_lost_plan_a_slot_is_released_before_a_request_is_copied_to_it() -> None:
    scheduler = make_scheduler(max_in_flight=0, max_batch=1, num_blocks=12, **HOST)
    runner = FakeRunner(scheduler, 0)
    requests, outputs = start(scheduler, runner, "a")
    assert preempt_one(scheduler, "a")
    while phase_of(scheduler, "a") is not RequestPhase.OFFLOADED:
        outputs += step(scheduler, runner)
    # The plan that releases the slot is lost, and the slot's next request comes by a copy.
    urgent = make_request("b", 5, 4)
    urgent.priority = -1
    scheduler.add(urgent)
    runner.lose_next = True
    outputs += step(scheduler, runner)
    assert not scheduler.is_live("b")
    outputs += stream(scheduler, runner)
    check_tokens(requests, outputs)
    plan, copy = copies(runner.plans)[-1]
    assert plan.moves.index(Release(copy.target.number)) < plan.moves.index(copy)


def cycle(*values: int) -> Callable[..., int]:
    numbers: Iterator[int] = itertools.cycle(values)
    return lambda *_: next(numbers)


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("accept", [0, 7, None])
def test_a_round_verifies_and_leaves_as_many_drafts_as_its_shape_says(delay: int, accept: int | None) -> None:
    """Also where id 0 replaces a missing draft; only real drafts count as drafts, unless id 0 is kept."""
    depths = (3, 1, 0, 7, 3)
    scheduler = make_scheduler(max_in_flight=delay, mtp_step=7, num_blocks=99, depth=cycle(*depths))
    runner = FakeRunner(scheduler, delay, accept=accept)
    requests, outputs = start(scheduler, runner, max_tokens=30)
    outputs += stream(scheduler, runner)
    check_tokens(requests, outputs)
    rounds = [plan for plan in runner.plans if plan.kind == "decode"]
    expected = list(itertools.islice(itertools.cycle(depths), len(rounds) + 1))
    assert [plan.shape for plan in rounds] == [(depth, depth) for depth in expected[1:]]
    assert [plan.num_drafts for plan in rounds] == list(map(min, itertools.pairwise(expected)))
    assert any(plan.catches_up for plan in rounds)
    metrics = [output.metrics for output in outputs if output.finish_reason]
    for one in metrics:
        pairs = zip(one.accepted_by_index, one.drafted_by_index, strict=True)
        assert all(kept <= (had if accept else 0) or accept is None for kept, had in pairs)
    for slot, request in enumerate(requests.values(), start=1):
        bounds = [(plan.num_drafts, plan.shape.verify) for plan in rounds if slot in plan.slots]
        for (least, most), pair in zip(bounds, request.history.rounds, strict=False):
            assert pair // 16 == max(least, pair % 16) <= most


def test_a_depth_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match=r"depth must be 0 to 3 \(mtp_step\), got 4; choose another"):
        make_scheduler(depth=lambda *_: 4)


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("pattern", [(1,), (1, 0)])
def test_rounds_run_in_two_phases_with_a_chunk_between_them(delay: int, pattern: tuple[int, ...]) -> None:
    turns = cycle(*pattern)
    scheduler = make_scheduler(max_in_flight=delay, num_blocks=60, is_two_phase=lambda: bool(turns()))
    runner = FakeRunner(scheduler, delay)
    requests, outputs = start(scheduler, runner, "a")
    requests["long"] = make_request("long", 33, 5, 8, ignore_eos=True)
    scheduler.add(requests["long"])
    outputs += stream(scheduler, runner)
    check_tokens(requests, outputs)
    kinds = [plan.kind for plan in runner.plans]
    # A round whose requests have all ended by then is not accepted.
    assert kinds.count("accept") <= kinds.count("verify") <= kinds.count("accept") + delay
    assert kinds.count("accept") > 3
    assert ("decode" in kinds) == (len(pattern) > 1)
    assert any(kinds[i : i + 3] == ["verify", "prefill", "accept"] for i in range(len(kinds)))
    verified = [plan for plan in runner.plans if plan.kind == "verify"]
    accepted = [plan for plan in runner.plans if plan.kind == "accept"]
    pairs = zip(verified, accepted, strict=False)
    assert all((v.slots, v.generations) == (a.slots, a.generations) for v, a in pairs)


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("is_lost", [False, True])
def test_what_ends_between_the_phases_is_released_after_them(delay: int, is_lost: bool) -> None:
    scheduler = make_scheduler(max_in_flight=delay, max_batch=2, is_two_phase=lambda: True)
    runner = FakeRunner(scheduler, delay)
    requests, outputs = start(scheduler, runner, "ab")
    while not (runner.plans[-1].kind == "verify" and len(runner.plans[-1].slots) == 2):
        outputs += step(scheduler, runner)
    requests["c"] = make_request("c", 5, 8, 7, ignore_eos=True)
    scheduler.add(requests["c"])
    scheduler.abort("a")
    scheduler.check_integrity()
    runner.lose_next = is_lost
    outputs += stream(scheduler, runner)
    reasons = {o.request_id: o.finish_reason for o in outputs if o.finish_reason}
    assert reasons == {"a": "abort", "b": "error" if is_lost else "length", "c": "length"}
    del requests["a"]
    check_tokens({"c": requests["c"]} if is_lost else requests, outputs)
    assert scheduler.pool.num_used == 0


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("index", [0, 1, 6])
@pytest.mark.parametrize("accept", [0, 3])
def test_logits_that_are_not_finite_end_their_request_after_the_tokens_before(
    delay: int, index: int, accept: int
) -> None:
    scheduler = make_scheduler(max_in_flight=delay)
    runner = FakeRunner(scheduler, delay, accept=accept)
    runner.broken = {(1, index), (2, 999)}
    requests = {name: make_request(name, 5 + i, 24, i, ignore_eos=True) for i, name in enumerate("abc")}
    for request in requests.values():
        scheduler.add(request)
    outputs = stream(scheduler, runner)
    last = {o.request_id: o for o in outputs if o.finish_reason}
    assert {name: o.finish_reason for name, o in last.items()} == {"a": "length", "b": "error", "c": "length"}
    # The prompt of b has 6 tokens.
    assert last["b"].error is not None
    assert f"got NaN or infinity for position {6 + index}; look for such numbers in the check" in str(
        last["b"].error
    )
    tokens = [token for o in outputs if o.request_id == "b" for token in o.new_token_ids]
    assert tokens == expected_tokens(requests.pop("b"), 40)[:index]
    assert last["b"].metrics.output_tokens == index
    check_tokens(requests, outputs)


def test_a_stop_before_the_row_that_is_not_finite_ends_the_request_without_an_error() -> None:
    scheduler = make_scheduler(max_in_flight=0)
    runner = FakeRunner(scheduler, 0, accept=3)
    runner.broken = {(1, 3)}
    experts = RoutedExperts((7, 1, 1), b"")
    scheduler._results.read_experts = lambda block_ids, count: experts._replace(shape=(count, 1, 1))
    scheduler.add(make_request("a", 5, 3, 1, ignore_eos=True, return_routed_experts=True))
    last = stream(scheduler, runner)[-1]
    assert (last.finish_reason, last.routed_experts) == ("length", experts)


def test_phases_follow_the_table_and_nothing_else() -> None:
    allowed = [(old, new) for old, following in TRANSITIONS.items() for new in following]
    assert len(allowed) == 10
    for old, new in itertools.product(RequestPhase, RequestPhase):
        if (old, new) in allowed:
            check_transition(old, new)
        else:
            with pytest.raises(AssertionError, match=f"{old.name} must be followed by .*, got {new.name}"):
                check_transition(old, new)


def test_what_is_owned_twice_is_found() -> None:
    scheduler = make_scheduler()
    start(scheduler, FakeRunner(scheduler, 1))
    one, other = list(scheduler._resources.owners.values())[:2]
    other.block_ids[0], saved = one.block_ids[0], other.block_ids[0]
    with pytest.raises(AssertionError, match="blocks must be held as often as they are owned"):
        scheduler.check_integrity()
    other.block_ids[0] = saved
    one.phase = RequestPhase.OFFLOADED
    with pytest.raises(AssertionError, match="disagrees with the location"):
        scheduler.check_integrity()
