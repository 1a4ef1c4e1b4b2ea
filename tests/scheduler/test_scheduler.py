"""The scheduler against a runner in pure Python that checks what every launch writes and reads."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from compiled_mtp.plan import StepResult
from compiled_mtp.request import Request, RequestOutput
from compiled_mtp.scheduler.phases import RequestPhase
from tests.fake_runner import EOS, FakeRunner
from tests.scheduling import (
    expected_tokens,
    finish_all,
    make_request,
    make_scheduler,
    phase_of,
    preempt_one,
    step,
    stream,
)


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("mtp_step", [0, 1, 3, 7])
@pytest.mark.parametrize("accept", [None, 0, "all"])
def test_streams_are_complete_whatever_is_accepted(delay: int, mtp_step: int, accept: object) -> None:
    scheduler = make_scheduler(mtp_step=mtp_step, max_in_flight=delay, num_blocks=40)
    kept = mtp_step if accept == "all" else accept
    runner = FakeRunner(scheduler, delay, accept=kept)  # type: ignore[arg-type]
    sizes = [(1, 30), (2, 1), (3, 7), (7, 40), (8, 2), (9, 12), (30, 20), (39, 9), (17, 3)]
    requests = [make_request(str(i), *size, seed=i) for i, size in enumerate(sizes)]
    for request in requests:
        scheduler.add(request)
    outputs = finish_all(scheduler, runner)
    for request in requests:
        mine = outputs[request.request_id]
        tokens = [token for output in mine for token in output.new_token_ids]
        assert tokens == expected_tokens(request, 40) == request.output_token_ids
        assert [output.finish_reason for output in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1].finish_reason == ("stop" if tokens[-1] == EOS else "length")
        assert mine[-1].metrics.output_tokens == len(tokens)
        assert mine[-1].metrics.prompt_tokens == request.prompt_len
        told = itertools.accumulate(len(output.new_token_ids) for output in mine)
        assert [output.metrics.output_tokens for output in mine] == list(told)
        assert mine[-1].metrics.rounds == sum(len(output.new_token_ids) > 0 for output in mine) - 1
    assert scheduler.pool.num_used == 0


@pytest.mark.parametrize("delay", [0, 1])
def test_a_long_prompt_delays_running_requests_by_one_chunk(delay: int) -> None:
    scheduler = make_scheduler(max_in_flight=delay)
    runner = FakeRunner(scheduler, delay, accept=0)
    scheduler.add(make_request("short", 3, 20, ignore_eos=True))
    while not any(plan.kind == "decode" for plan in runner.plans):
        step(scheduler, runner)
    scheduler.add(make_request("long", 35, 4, ignore_eos=True))
    for _ in range(10):
        step(scheduler, runner)
    kinds = [plan.kind for plan in runner.plans[-10:]]
    assert kinds == ["prefill", "decode"] * 5
    starts = [plan.prompt_chunks[0].start for plan in runner.plans[-10:] if plan.kind == "prefill"]
    assert starts == [0, 8, 16, 24, 32]


@pytest.mark.parametrize("delay", [0, 1])
def test_no_round_is_launched_that_is_certainly_useless(delay: int) -> None:
    scheduler = make_scheduler(mtp_step=0, max_in_flight=delay)
    runner = FakeRunner(scheduler, delay)
    for name, max_tokens in (("a", 6), ("b", 1)):
        scheduler.add(make_request(name, 3, max_tokens, ignore_eos=True))
    finish_all(scheduler, runner)
    assert [plan.kind for plan in runner.plans].count("decode") == 5


def test_requests_run_first_come_first_served_and_a_big_one_is_not_overtaken() -> None:
    scheduler = make_scheduler(num_blocks=11, mtp_step=0, max_in_flight=0)
    runner = FakeRunner(scheduler, 0)
    sizes = {"first": (10, 4), "big": (30, 10), "small": (2, 2)}
    for name, (prompt_len, max_tokens) in sizes.items():
        scheduler.add(make_request(name, prompt_len, max_tokens, ignore_eos=True))
    ended = [output.request_id for output in stream(scheduler, runner) if output.finish_reason]
    assert ended == ["first", "big", "small"]


def test_what_can_never_run_is_refused_with_the_numbers() -> None:
    scheduler = make_scheduler(num_blocks=6)
    scheduler.add(make_request("same", 3, 4))
    with pytest.raises(ValueError, match="request_id must be unused, got 'same'"):
        scheduler.add(make_request("same", 3, 4))
    with pytest.raises(
        ValueError, match=r"prompt and a token must fit into 5 blocks of 4 tokens, got a prompt of 20; shor"
    ):
        scheduler.add(make_request("wide", 20, 4))
    assert scheduler.num_waiting == 1
    with pytest.raises(ValueError, match="prefill_chunk must be at least 1, got 0"):
        make_scheduler(prefill_chunk=0)


def test_a_full_batch_runs_a_request_of_max_model_len() -> None:
    scheduler = make_scheduler(num_blocks=11, max_batch=1)
    runner = FakeRunner(scheduler, 1, accept=3)
    scheduler.add(make_request("a", 20, 100, ignore_eos=True))
    outputs = finish_all(scheduler, runner)["a"]
    assert outputs[-1].metrics.output_tokens == 20
    assert outputs[-1].finish_reason == "length"


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("mtp_step", [0, 1, 3])
@pytest.mark.parametrize("max_tokens", [3, 4, 9])
def test_the_worst_case_is_reached_and_never_exceeded(delay: int, mtp_step: int, max_tokens: int) -> None:
    # With nothing accepted and blocks of one token every position of the worst case is reserved in the end.
    prompt_len = 5
    blocks = prompt_len + max_tokens - 1 + (delay + 2) * mtp_step
    scheduler = make_scheduler(num_blocks=99, block_size=1, mtp_step=mtp_step, max_in_flight=delay)
    runner = FakeRunner(scheduler, delay, accept=0)
    scheduler.add(make_request("a", prompt_len, max_tokens, ignore_eos=True))
    most = 0
    while scheduler.has_unfinished():
        result = runner.run(scheduler.schedule())
        most = max(most, scheduler.pool.num_used)
        scheduler.update(result)
        scheduler.take_outputs()
    assert most == blocks


def test_results_must_come_in_the_order_of_their_launches() -> None:
    scheduler = make_scheduler(max_in_flight=1)
    runner = FakeRunner(scheduler, 1, accept=0)
    scheduler.add(make_request("a", 3, 20, ignore_eos=True))
    step(scheduler, runner)
    step(scheduler, runner)
    late = scheduler.schedule()
    assert late is not None
    with pytest.raises(AssertionError, match=r"the result of step 1 is due, got 2"):
        scheduler.update(StepResult(late, [[1]]))


@pytest.mark.parametrize("steps", range(6))
@pytest.mark.parametrize("delay", [0, 1])
def test_abort_at_any_time_frees_everything_once_and_leaves_the_others(steps: int, delay: int) -> None:
    scheduler = make_scheduler(max_in_flight=delay)
    runner = FakeRunner(scheduler, delay)
    gone, stays = make_request("gone", 20, 15, seed=1), make_request("stays", 5, 15, seed=2)
    scheduler.add(gone)
    scheduler.add(stays)
    outputs = [output for _ in range(steps) for output in step(scheduler, runner)]
    scheduler.abort("gone")
    with pytest.raises(ValueError, match="request_id must name a request that has not finished, got 'gone'"):
        scheduler.abort("gone")
    scheduler.add(make_request("next", 5, 15, seed=3))
    outputs += stream(scheduler, runner)
    mine = [output for output in outputs if output.request_id == "gone"]
    assert [output.finish_reason for output in mine if output.finish_reason] == ["abort"]
    tokens = [token for output in outputs if output.request_id == "stays" for token in output.new_token_ids]
    assert tokens == expected_tokens(stays, 40)
    assert scheduler.pool.num_used == 0


def test_a_forgotten_request_leaves_no_output_and_an_aborted_id_is_in_use_until_its_output_is_taken() -> None:
    scheduler = make_scheduler()
    runner = FakeRunner(scheduler, 0)
    for name in "abc":
        scheduler.add(make_request(name, 5, 12, ignore_eos=True))
    step(scheduler, runner)
    scheduler.abort("a")
    with pytest.raises(ValueError, match="request_id must be unused, got 'a'"):
        scheduler.add(make_request("a", 5, 3))
    scheduler.abort("b")
    scheduler.forget(["b", "c", "unknown"])
    outputs = stream(scheduler, runner)
    assert [(o.request_id, o.finish_reason) for o in outputs] == [("a", "abort")]
    scheduler.add(make_request("a", 5, 3))
    assert scheduler.pool.num_used == 0


@settings(deadline=None)
@given(
    mtp_step=st.integers(0, 4),
    delay=st.integers(0, 1),
    max_batch=st.integers(1, 4),
    block_size=st.sampled_from([1, 4, 16]),
    lengths=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 150)), min_size=1, max_size=6),
    seed=st.integers(0, 1000),
    accepts_all=st.booleans(),
)
def test_rounds_planned_ahead_equal_those_planned_one_by_one(
    mtp_step: int,
    delay: int,
    max_batch: int,
    block_size: int,
    lengths: list[tuple[int, int]],
    seed: int,
    accepts_all: bool,
) -> None:
    def run(looks_every_time: bool) -> list[object]:
        scheduler = make_scheduler(
            mtp_step=mtp_step,
            max_in_flight=delay,
            max_batch=max_batch,
            block_size=block_size,
            num_blocks=2000,
            max_model_len=200,
        )
        runner = FakeRunner(scheduler, delay, seed, accept=mtp_step if accepts_all else None)
        for index, (prompt_len, max_tokens) in enumerate(lengths):
            request = make_request(str(index), prompt_len, max_tokens, index, ignore_eos=accepts_all)
            scheduler.add(request)
        while scheduler.has_unfinished():
            if looks_every_time:
                scheduler._planner.look_again()
            step(scheduler, runner)
        return [(plan.kind, plan.slots, plan.generations, plan.prompt_chunks) for plan in runner.plans]

    assert run(False) == run(True)


def test_a_batch_that_does_not_change_is_seldom_examined() -> None:
    scheduler = make_scheduler(block_size=16, num_blocks=200, max_model_len=1000)
    runner = FakeRunner(scheduler, 1, accept=3)
    for name in "abc":
        scheduler.add(make_request(name, 8, 900, ignore_eos=True))
    looks, look_ahead = [0], scheduler._planner._look_ahead

    def counted() -> None:
        looks[0] += 1
        look_ahead()

    scheduler._planner._look_ahead = counted  # type: ignore[method-assign]
    stream(scheduler, runner)
    rounds = [plan for plan in runner.plans if plan.kind == "decode"]
    # Eight blocks hold 32 whole windows; more examinations where requests come and go.
    assert len(rounds) > 220
    assert looks[0] < 20
    assert sum(bool(plan.block_updates) for plan in rounds) < 10


def test_the_scheduler_needs_no_torch() -> None:
    code = "import sys, compiled_mtp.scheduler; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come and go at random; nothing is lost, nothing is owned twice."""

    @initialize(
        mtp_step=st.integers(0, 4),
        delay=st.integers(0, 1),
        max_batch=st.integers(1, 4),
        num_blocks=st.integers(5, 40),
        block_size=st.sampled_from([1, 4, 5]),
        max_model_len=st.integers(2, 40),
        prefill_chunk=st.sampled_from([8, 40]),
        max_prompt_chunks=st.integers(1, 4),
        copy_delay=st.integers(0, 2),
        has_policies=st.booleans(),
        seed=st.integers(0, 1000),
    )
    def start(self, delay: int, copy_delay: int, has_policies: bool, seed: int, **numbers: int) -> None:
        rng = random.Random(seed)
        policies = {
            "depth": lambda *_: rng.randint(0, numbers["mtp_step"]),
            "is_two_phase": lambda: rng.random() < 0.5,
        }
        self.scheduler = make_scheduler(
            max_in_flight=delay,
            host_records=2,
            host_blocks=20,
            **numbers,
            **(policies if has_policies else {}),
        )
        self.runner = FakeRunner(self.scheduler, delay, seed, copy_delay=copy_delay)
        self.requests: dict[str, Request] = {}
        self.tokens: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}

    @rule(prompt_len=st.integers(1, 39), max_tokens=st.integers(1, 40), ignore_eos=st.booleans())
    def add(self, prompt_len: int, max_tokens: int, ignore_eos: bool) -> None:
        name = str(len(self.requests))
        request = make_request(name, prompt_len, max_tokens, seed=len(self.requests), ignore_eos=ignore_eos)
        try:
            self.scheduler.add(request)
        except ValueError:
            is_refused = True
        else:
            is_refused = False
            self.requests[name], self.tokens[name] = request, []
        assert is_refused == (prompt_len >= self.scheduler.limits.longest)

    @rule()
    def step(self) -> None:
        self.take(step(self.scheduler, self.runner))

    @rule()
    def fail(self) -> None:
        self.runner.fail_next = True
        self.step()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        if self.requests[name].finish_reason is None:
            self.scheduler.abort(name)
        else:
            with pytest.raises(ValueError, match="has not finished"):
                self.scheduler.abort(name)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        self.runner.lose_next = True
        self.step()
        self.runner.lose_next = False

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def preempt_one(self, data: st.DataObject) -> None:
        preempt_one(self.scheduler, data.draw(st.sampled_from(sorted(self.requests))))

    def take(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            assert output.request_id not in self.reasons, "output after the end"
            self.tokens[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                self.reasons[output.request_id] = output.finish_reason

    @invariant()
    def every_block_and_slot_has_one_owner(self) -> None:
        self.scheduler.check_integrity()
        live = [name for name, r in self.requests.items() if r.finish_reason is None]
        phases = Counter(phase_of(self.scheduler, name) for name in live)
        assert self.scheduler.num_waiting == phases[RequestPhase.WAITING]
        assert self.scheduler.num_running == phases[RequestPhase.PREFILLING] + phases[RequestPhase.RUNNING]

    @invariant()
    def tokens_are_a_prefix_of_the_plainstream(self) -> None:
        for name, request in self.requests.items():
            expected = expected_tokens(request, self.scheduler.limits.longest)
            tokens = self.tokens[name]
            assert tokens == expected[: len(tokens)]
            if self.reasons.get(name) in ("stop", "length"):
                assert tokens == expected

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(3000):
            if not self.scheduler.has_unfinished():
                break
            self.step()
        assert set(self.reasons) == set(self.requests)
        self.every_block_and_slot_has_one_owner()
        self.tokens_are_a_prefix_of_the_plainstream()
        assert self.scheduler.pool.num_used == self.scheduler.num_running == 0


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
