"""The scheduler against a runner in pure Python that knows what every launch writes and when it is read."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from compiled_mtp.request import Request, RequestOutput, SamplingParams, StepPlan, StepResult
from compiled_mtp.scheduler import Scheduler

EOS = 7


def token_at(seed: int, index: int) -> int:
    """The index-th output token of the request with this seed; one in 15 is an eos."""
    return random.Random(f"{seed} {index}").randrange(EOS, EOS + 15)


@dataclass
class Row:
    """The device's view of a slot."""

    generation: int
    seed: int
    prompt: list[int] = field(default_factory=list)
    pos: int = 0
    blocks: dict[int, int] = field(default_factory=dict)


class FakeRunner:
    """Executes plans at once and hands their results out `delay` launches late, as a device would."""

    def __init__(self, scheduler: Scheduler, delay: int, seed: int = 0, accept: int | None = None) -> None:
        self.scheduler = scheduler
        self.delay = delay
        self.rows: dict[int, Row] = {}
        self.random = random.Random(seed)
        self.accept = accept
        self.results: deque[StepResult] = deque()
        self.plans: list[StepPlan] = []
        self.fail_next = False
        self.lose_next = False
        self.has_failed = False

    def run(self, plan: StepPlan | None) -> StepResult | None:
        if plan is not None and self.lose_next:
            # As a launch that raises: nothing of it happens, and its error comes before its turn.
            self.lose_next, self.has_failed = False, True
            self.plans.append(plan)
            return StepResult(plan, [], "out of memory")
        if plan is not None:
            self._install(plan)
            tokens = self._prefill(plan) if plan.kind == "prefill" else self._decode(plan)
            error = "the device is on fire" if self.fail_next else None
            self.has_failed |= self.fail_next
            self.fail_next = False
            self.results.append(StepResult(plan, [] if error else tokens, error))
            self.plans.append(plan)
            if len(self.results) <= self.delay:
                return None
        return self.results.popleft() if self.results else None

    def _install(self, plan: StepPlan) -> None:
        for slot in plan.released:
            self.rows.pop(slot, None)
        for init in plan.admitted:
            assert init.slot not in self.rows, "a slot is given out before it was released"
            self.rows[init.slot] = Row(init.generation, init.seed)
        for slot, index, block_id in plan.block_updates:
            places = [
                (owner, at)
                for owner, row in self.rows.items()
                for at, owned_id in row.blocks.items()
                if owned_id == block_id
            ]
            # After an error a plan says again what may have been lost.
            assert not places or (self.has_failed and places == [(slot, index)]), "a block has two owners"
            assert index == len(self.rows[slot].blocks) or places
            self.rows[slot].blocks[index] = block_id
        assert 0 not in plan.slots
        assert len(set(plan.slots)) == len(plan.slots)
        for slot, generation in zip(plan.slots, plan.generations, strict=True):
            assert self.rows[slot].generation == generation

    def _write(self, row: Row, first: int, last: int) -> None:
        for position in range(first, min(last, self.scheduler.max_model_len - 1) + 1):
            assert row.blocks.get(position // self.scheduler.block_size, 0) > 0, f"{position} is not reserved"

    def _prefill(self, plan: StepPlan) -> list[list[int]]:
        (slot,) = plan.slots
        row, end = self.rows[slot], plan.start + len(plan.token_ids)
        assert plan.start == len(row.prompt)
        assert plan.start % self.scheduler.prefill_chunk == 0
        assert 1 <= len(plan.token_ids) <= self.scheduler.prefill_chunk
        row.prompt += plan.token_ids
        self._write(row, plan.start, end - 1 + (plan.mtp_step if plan.is_last else 0))
        row.pos = end
        return [[token_at(row.seed, 0)] if plan.is_last else []]

    def _decode(self, plan: StepPlan) -> list[list[int]]:
        tokens = []
        for slot in plan.slots:
            row = self.rows[slot]
            self._write(row, row.pos, row.pos + 2 * plan.mtp_step)
            accepted = self.random.randint(0, plan.mtp_step) if self.accept is None else self.accept
            index = row.pos - len(row.prompt) + 1
            tokens.append([token_at(row.seed, index + k) for k in range(accepted + 1)])
            row.pos += accepted + 1
        return tokens


def make_scheduler(**numbers: int) -> Scheduler:
    defaults = {
        "max_batch": 3,
        "num_blocks": 31,
        "block_size": 4,
        "max_model_len": 40,
        "prefill_chunk": 8,
        "mtp_step": 3,
        "max_in_flight": 1,
    }
    return Scheduler(**(defaults | numbers))


def make_request(name: str, prompt_len: int, max_tokens: int, seed: int = 0, **fields: object) -> Request:
    params = SamplingParams(max_tokens=max_tokens, seed=seed, **fields)  # type: ignore[arg-type]
    return Request(name, list(range(100, 100 + prompt_len)), params, eos_token_ids=frozenset({EOS}))


def expected_tokens(request: Request, max_model_len: int) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < min(request.params.max_tokens, max_model_len - request.prompt_len):
        tokens.append(token_at(request.seed, len(tokens)))
        if tokens[-1] == EOS and not request.params.ignore_eos:
            break
    return tokens


def step(scheduler: Scheduler, runner: FakeRunner) -> list[RequestOutput]:
    return scheduler.update(runner.run(scheduler.schedule()))


def finish_all(scheduler: Scheduler, runner: FakeRunner) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {}
    for _ in range(2000):
        if not scheduler.has_unfinished():
            return outputs
        for output in step(scheduler, runner):
            outputs.setdefault(output.request_id, []).append(output)
    raise AssertionError("the requests do not end")


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
        # One object for all of them, as its docstring says.
        assert all(output.metrics is request.metrics for output in mine)
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
    starts = [plan.start for plan in runner.plans[-10:] if plan.kind == "prefill"]
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
    ended = [output.request_id for output in _stream(scheduler, runner) if output.finish_reason]
    assert ended == ["first", "big", "small"]


def _stream(scheduler: Scheduler, runner: FakeRunner) -> list[RequestOutput]:
    outputs: list[RequestOutput] = []
    while scheduler.has_unfinished():
        outputs += step(scheduler, runner)
    return outputs


def test_what_can_never_run_is_refused_with_the_numbers() -> None:
    scheduler = make_scheduler(num_blocks=6)
    scheduler.add(make_request("same", 3, 4))
    with pytest.raises(ValueError, match="request_id must be unused, got 'same'"):
        scheduler.add(make_request("same", 3, 4))
    with pytest.raises(
        ValueError, match="prompt must be shorter than max_model_len=40 tokens, got 40; shorten it"
    ):
        scheduler.add(make_request("long", 40, 4))
    with pytest.raises(
        ValueError, match=r"must fit into 5 blocks of 4 tokens, got 15 and 4 tokens, which need 7;"
    ):
        scheduler.add(make_request("wide", 15, 4))
    assert scheduler.num_waiting == 1
    with pytest.raises(ValueError, match="prefill_chunk must be at least 1, got 0"):
        make_scheduler(prefill_chunk=0)


def test_a_full_house_runs_a_request_of_max_model_len() -> None:
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
    numbers = {"block_size": 1, "mtp_step": mtp_step, "max_in_flight": delay}
    with pytest.raises(ValueError, match=f"which need {blocks};"):
        make_scheduler(num_blocks=blocks, **numbers).add(make_request("a", prompt_len, max_tokens))
    scheduler = make_scheduler(num_blocks=blocks + 1, **numbers)
    runner = FakeRunner(scheduler, delay, accept=0)
    scheduler.add(make_request("a", prompt_len, max_tokens, ignore_eos=True))
    most = 0
    while scheduler.has_unfinished():
        result = runner.run(scheduler.schedule())
        most = max(most, scheduler.pool.num_used)
        scheduler.update(result)
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
    outputs += _stream(scheduler, runner)
    mine = [output for output in outputs if output.request_id == "gone"]
    assert [output.finish_reason for output in mine if output.finish_reason] == ["abort"]
    tokens = [token for output in outputs if output.request_id == "stays" for token in output.new_token_ids]
    assert tokens == expected_tokens(stays, 40)
    assert scheduler.pool.num_used == 0


@pytest.mark.parametrize("delay", [0, 1])
def test_an_error_ends_the_requests_of_its_launch_alone(delay: int) -> None:
    scheduler = make_scheduler(max_in_flight=delay)
    runner = FakeRunner(scheduler, delay)
    for name, prompt_len in (("a", 5), ("b", 20)):
        scheduler.add(make_request(name, prompt_len, 12, seed=5, ignore_eos=True))
    while not (runner.plans and runner.plans[-1].start == 8):
        step(scheduler, runner)
    runner.fail_next = True
    ended = step(scheduler, runner)
    failed = runner.plans[-1]
    outputs = {o.request_id: o for o in ended + _stream(scheduler, runner) if o.finish_reason}
    names = {"decode": "a", "prefill": "b"}
    for kind, name in names.items():
        is_failed = kind == failed.kind
        assert (outputs[name].finish_reason == "error") == is_failed
        assert outputs[name].error == ("the device is on fire" if is_failed else None)
    assert scheduler.pool.num_used == 0


@given(
    delay=st.integers(0, 1),
    lost=st.sets(st.integers(0, 60), min_size=1, max_size=4),
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 60)), min_size=2, max_size=6),
    seed=st.integers(0, 1000),
)
def test_launches_that_are_lost_end_their_own_requests_alone(
    delay: int, lost: set[int], lengths: list[tuple[int, int]], seed: int
) -> None:
    """Whatever a lost plan would have installed for the others reaches the device with a later one."""
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
        owners = {r.slot: name for name, r in requests.items() if r.slot}
        before = len(runner.plans)
        outputs = step(scheduler, runner)
        if runner.has_failed and index in lost and len(runner.plans) > before:
            owners |= {r.slot: name for name, r in requests.items() if r.slot}
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
def test_after_an_interrupted_step_those_who_wait_go_on(delay: int, steps: int) -> None:
    scheduler = make_scheduler(max_in_flight=delay, max_batch=2)
    runner = FakeRunner(scheduler, delay)
    requests = {name: make_request(name, 12, 9, seed=5, ignore_eos=True) for name in "abcd"}
    for request in requests.values():
        scheduler.add(request)
    outputs = [output for _ in range(steps) for output in step(scheduler, runner)]
    scheduler.schedule()  # planned, never launched
    started = {name for name in requests if name not in {r.request_id for r in scheduler._waiting}}
    finished = {output.request_id for output in outputs if output.finish_reason}
    scheduler.recover("interrupted")
    runner.results.clear()
    runner.has_failed = True
    outputs += _stream(scheduler, runner)
    reasons = {o.request_id: o.finish_reason for o in outputs if o.finish_reason}
    assert {name for name, reason in reasons.items() if reason == "error"} == started - finished
    for name, request in requests.items():
        tokens = [token for o in outputs if o.request_id == name for token in o.new_token_ids]
        expected = expected_tokens(request, 40)
        assert tokens == (expected[: len(tokens)] if reasons[name] == "error" else expected)
    assert reasons.keys() == requests.keys()
    assert scheduler.pool.num_used == 0


def test_a_forgotten_request_leaves_no_output_and_an_aborted_id_is_in_use_until_it_was_told() -> None:
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
    outputs = _stream(scheduler, runner)
    assert [(o.request_id, o.finish_reason) for o in outputs] == [("a", "abort")]
    scheduler.add(make_request("a", 5, 3))
    assert scheduler.pool.num_used == 0


@given(
    mtp_step=st.integers(0, 4),
    delay=st.integers(0, 1),
    max_batch=st.integers(1, 4),
    block_size=st.sampled_from([1, 4, 16]),
    lengths=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 150)), min_size=1, max_size=6),
    seed=st.integers(0, 1000),
    accepts_all=st.booleans(),
)
def test_rounds_planned_without_a_look_are_those_a_look_would_plan(
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
                scheduler._rounds_ahead = 0
            step(scheduler, runner)
        return [(plan.kind, plan.slots, plan.generations, plan.start) for plan in runner.plans]

    assert run(False) == run(True)


def test_a_batch_that_does_not_change_is_looked_at_seldom() -> None:
    scheduler = make_scheduler(block_size=16, num_blocks=200, max_model_len=1000)
    runner = FakeRunner(scheduler, 1, accept=3)
    for name in "abc":
        scheduler.add(make_request(name, 8, 900, ignore_eos=True))
    looks, look_ahead = [0], scheduler._look_ahead

    def counted() -> list[tuple[int, int, int]]:
        looks[0] += 1
        return look_ahead()

    scheduler._look_ahead = counted  # type: ignore[method-assign]
    _stream(scheduler, runner)
    rounds = [plan for plan in runner.plans if plan.kind == "decode"]
    # Eight blocks hold 32 whole windows; more looks where requests come and go.
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
        seed=st.integers(0, 1000),
    )
    def start(self, delay: int, seed: int, **numbers: int) -> None:
        self.scheduler = make_scheduler(max_in_flight=delay, **numbers)
        self.runner = FakeRunner(self.scheduler, delay, seed)
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
        scheduler = self.scheduler
        longest = min(prompt_len + max_tokens + 3 * scheduler.mtp_step, scheduler.max_model_len)
        may_fit = prompt_len < scheduler.max_model_len and longest <= scheduler.block_size * (
            scheduler.pool.num_blocks - 1
        )
        assert not (is_refused and may_fit)

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

    def take(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            assert output.request_id not in self.reasons, "output after the end"
            self.tokens[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                self.reasons[output.request_id] = output.finish_reason

    @invariant()
    def every_block_and_slot_has_one_owner(self) -> None:
        live = [r for r in self.requests.values() if r.finish_reason is None]
        owned = [block_id for request in live for block_id in request.block_ids]
        assert len(set(owned)) == len(owned) == self.scheduler.pool.num_used
        assert all(0 < block_id < self.scheduler.pool.num_blocks for block_id in owned)
        slots = [request.slot for request in live if request.slot]
        assert len(set(slots)) == len(slots) == self.scheduler.num_running
        assert len(live) == self.scheduler.num_running + self.scheduler.num_waiting

    @invariant()
    def tokens_are_a_prefix_of_the_plain_stream(self) -> None:
        for name, request in self.requests.items():
            expected = expected_tokens(request, self.scheduler.max_model_len)
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
        self.tokens_are_a_prefix_of_the_plain_stream()
        assert self.scheduler.pool.num_used == self.scheduler.num_running == 0


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
