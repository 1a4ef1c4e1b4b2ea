"""Lost launches, errors, interrupts: the scheduler goes on, and repeats what a lost plan installed."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_mtp.scheduler import Scheduler
from tests.aimed import Aim, Line
from tests.fake_runner import FakeRunner
from tests.scheduling import expected_tokens, make_request, make_scheduler, step, stream


@pytest.mark.parametrize("delay", [0, 1])
def test_an_error_ends_the_requests_of_its_launch_alone(delay: int) -> None:
    scheduler = make_scheduler(max_in_flight=delay)
    runner = FakeRunner(scheduler, delay)
    for name, prompt_len in (("a", 5), ("b", 20)):
        scheduler.add(make_request(name, prompt_len, 12, seed=5, ignore_eos=True))
    while not (
        runner.plans and [prompt_chunk.start for prompt_chunk in runner.plans[-1].prompt_chunks] == [8]
    ):
        step(scheduler, runner)
    runner.fail_next = True
    ended = step(scheduler, runner)
    failed = runner.plans[-1]
    outputs = {o.request_id: o for o in ended + stream(scheduler, runner) if o.finish_reason}
    names = {"decode": "a", "prefill": "b"}
    for kind, name in names.items():
        is_failed = kind == failed.kind
        assert (outputs[name].finish_reason == "error") == is_failed
        assert outputs[name].error == ("the device is on fire" if is_failed else None)
    assert scheduler.pool.num_used == 0


def owners_of(scheduler: Scheduler) -> dict[int, str]:
    return {slot: one.request.request_id for slot, one in scheduler._resources.owners.items()}


@settings(deadline=None)
@given(
    delay=st.integers(0, 1),
    lost=st.sets(st.integers(0, 60), min_size=1, max_size=4),
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 60)), min_size=2, max_size=6),
    seed=st.integers(0, 1000),
)
def test_launches_that_are_lost_end_their_own_requests_alone(
    delay: int, lost: set[int], lengths: list[tuple[int, int]], seed: int
) -> None:
    """What a lost plan would have installed for other requests reaches the device with a later plan."""
    scheduler = make_scheduler(max_in_flight=delay, num_blocks=101, max_model_len=100, block_size=1)
    runner = FakeRunner(scheduler, delay, seed)
    requests = {
        str(i): make_request(str(i), prompt_len, tokens, seed=i, ignore_eos=True)
        for i, (prompt_len, tokens) in enumerate(lengths)
        if prompt_len + tokens + 20 < 100
    }
    for request in requests.values():
        scheduler.add(request)
    tokens: dict[str, list[int]] = {name: [] for name in requests}
    reasons: dict[str, str] = {}
    hit: set[str] = set()
    for index in itertools.count():
        if not scheduler.has_unfinished():
            break
        assert index < 5000, "the scheduler hangs"
        runner.lose_next = index in lost
        owners = owners_of(scheduler)
        before = len(runner.plans)
        outputs = step(scheduler, runner)
        if runner.has_failed and index in lost and len(runner.plans) > before:
            owners |= owners_of(scheduler)
            hit |= {owners[slot] for slot in runner.plans[-1].slots if slot in owners}
        runner.lose_next = False
        for output in outputs:
            tokens[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                assert output.request_id not in reasons, "a request ended twice"
                reasons[output.request_id] = output.finish_reason
    assert reasons.keys() == requests.keys()
    for name, request in requests.items():
        expected = expected_tokens(request, 100)
        if reasons[name] == "error":
            assert tokens[name] == expected[: len(tokens[name])]
        else:
            assert tokens[name] == expected
            assert name not in hit
    assert scheduler.pool.num_used == 0


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("steps", range(1, 12))
def test_after_an_interrupted_step_waiting_requests_go_on(delay: int, steps: int) -> None:
    scheduler = make_scheduler(max_in_flight=delay, max_batch=2)
    runner = FakeRunner(scheduler, delay)
    requests = {name: make_request(name, 12, 9, seed=5, ignore_eos=True) for name in "abcd"}
    for request in requests.values():
        scheduler.add(request)
    outputs = [output for _ in range(steps) for output in step(scheduler, runner)]
    scheduler.schedule()  # planned, never launched
    started = {name for name in requests if (name, 0) not in scheduler._planner.admission.waiting}
    finished = {output.request_id for output in outputs if output.finish_reason}
    scheduler.recover("interrupted")
    runner.drop()
    outputs += stream(scheduler, runner)
    reasons = {o.request_id: o.finish_reason for o in outputs if o.finish_reason}
    assert {name for name, reason in reasons.items() if reason == "error"} == started - finished
    for name, request in requests.items():
        tokens = [token for o in outputs if o.request_id == name for token in o.new_token_ids]
        expected = expected_tokens(request, 40)
        assert tokens == (expected[: len(tokens)] if reasons[name] == "error" else expected)
    assert reasons.keys() == requests.keys()
    assert scheduler.pool.num_used == 0


@pytest.mark.parametrize("delay", [0, 1])
def test_recover_may_be_interrupted_anywhere_and_called_again(delay: int) -> None:
    """Every request that had begun ends once with an error, and waiting requests go on."""
    files = ("scheduler", "cache", "request")

    def down(aim: Aim, steps: int) -> None:
        scheduler = make_scheduler(max_in_flight=delay, max_batch=2)
        runner = FakeRunner(scheduler, delay)
        requests = {name: make_request(name, 12, 9, seed=5, ignore_eos=True) for name in "abcd"}
        for request in requests.values():
            scheduler.add(request)
        outputs = [output for _ in range(steps) for output in step(scheduler, runner)]
        started = {name for name in requests if (name, 0) not in scheduler._planner.admission.waiting}
        finished = {output.request_id for output in outputs if output.finish_reason}
        try:
            with aim.watching():
                scheduler.recover("interrupted")
        except KeyboardInterrupt:
            scheduler.recover("interrupted again")
        scheduler.check_integrity()
        runner.drop()
        outputs += stream(scheduler, runner)
        ends = [(one.request_id, one.finish_reason) for one in outputs if one.finish_reason]
        assert len(ends) == len(requests)
        assert {name for name, reason in ends if reason == "error"} == started - finished
        for name, reason in ends:
            tokens = [token for one in outputs if one.request_id == name for token in one.new_token_ids]
            expected = expected_tokens(requests[name], 40)
            assert tokens == (expected[: len(tokens)] if reason == "error" else expected)

    for steps in (4, 9):
        watch = Aim(files)
        down(watch, steps)
        for target in [Line(*key, time) for key, most in watch.lines.items() for time in {1, 2, most}]:
            down(Aim(files, target=target), steps)
