"""Blocks run short: requests are offloaded and resumed, or replayed; tokens, order and ownership stay."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compiled_mtp.plan import StepPlan
from compiled_mtp.request import Request, RequestOutput, RoundDrafts
from compiled_mtp.scheduler import Scheduler
from compiled_mtp.scheduler.phases import RequestPhase
from compiled_mtp.scheduler.scheduled_request import ScheduledRequest
from compiled_mtp.scheduler.waiting_queue import WaitingQueue
from tests.fake_runner import FakeRunner, token_at
from tests.scheduling import expected_tokens, make_request, make_scheduler, phase_of, step, stream


class Recorder:
    """A grammar that takes every token, each once in the order of the output."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.is_ended, self.error = False, None
        self.num_taken = 0

    def accept(self, token_ids: Sequence[int]) -> int:
        for token_id in token_ids:
            assert token_id == token_at(self.seed, self.num_taken)
            self.num_taken += 1
        return len(token_ids)

    def reset(self) -> None:
        self.num_taken = 0


def check_windows(scheduler: Scheduler, runner: FakeRunner, plan: StepPlan) -> None:
    """When masks are made, grammars have taken every token on the device, and drafts are the round's."""
    for window in scheduler.windows(plan):
        row = runner.row(plan.slots[window.row // (plan.shape.verify + 1)])
        assert isinstance(window.guide, Recorder)
        num_tokens = 0 if plan.kind == "first" else row.pos - len(row.prompt) + 1
        assert window.guide.num_taken == num_tokens
        assert list(window.drafts) == row.drafts[: plan.shape.verify]


def masked_step(scheduler: Scheduler, runner: FakeRunner) -> list[RequestOutput]:
    """Do `step`, and check what masks would be made from."""
    plan = scheduler.schedule()
    scheduler.check_integrity()
    if plan is not None and plan.is_guided:
        check_windows(scheduler, runner, plan)
    result = runner.run(plan)
    scheduler.update(result)
    scheduler.check_integrity()
    outputs = scheduler.take_outputs()
    if result is not None:
        check_drafts(runner, result.plan, outputs)
    return outputs


def check_drafts(runner: FakeRunner, plan: StepPlan, outputs: list[RequestOutput]) -> None:
    """A request with include_drafts gets the drafts that its rounds verified, except known tokens."""
    for output in outputs:
        if output.drafts is None or plan.kind not in ("decode", "accept") or not output.new_token_ids:
            assert not output.drafts
            continue
        metrics, (told,) = output.metrics, output.drafts
        done, verified = runner.verified[plan.step_id, metrics.seed]
        num_known = metrics.output_tokens - len(output.new_token_ids) - done
        assert 0 <= num_known <= len(verified)
        most = max(plan.num_drafts - num_known, told.num_accepted)
        assert told.token_ids == verified[num_known:][:most]
        assert len(output.new_token_ids) - told.num_accepted in (0, 1)


class Log:
    """Collects and checks the outputs of requests."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.entries: dict[str, list[int]] = {}
        self.drafts: dict[str, list[RoundDrafts]] = {}
        self.last: dict[str, RequestOutput] = {}

    def take(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            name = output.request_id
            assert name not in self.last, "output after the end"
            self.tokens.setdefault(name, []).extend(output.new_token_ids)
            self.entries.setdefault(name, []).extend(e.token_id for e in output.logprobs or ())
            self.drafts.setdefault(name, []).extend(output.drafts or ())
            if output.finish_reason is not None:
                self.last[name] = output

    def check(self, requests: list[Request], longest: int) -> None:
        for request in requests:
            name = request.request_id
            if self.last[name].finish_reason == "abort":
                expected = expected_tokens(request, longest)[: len(self.tokens[name])]
            else:
                expected = expected_tokens(request, longest)
                assert self.last[name].finish_reason in ("stop", "length")
            assert self.tokens[name] == expected
            assert self.last[name].metrics.output_tokens == len(expected)
            if request.params.logprobs is not None:
                assert self.entries[name] == expected
            history = self.last[name].metrics
            if request.params.include_drafts:
                rounds = self.drafts[name]
                assert len(rounds) == history.rounds
                assert sum(len(one.token_ids) for one in rounds) == sum(history.drafted_by_index)
                assert sum(one.num_accepted for one in rounds) == sum(history.accepted_by_index)
            else:
                assert not self.drafts[name]
            kept = sum(n * count for n, count in enumerate(history.rounds_by_accepted))
            # A round gives its bonus token too, unless a stop has cut it off.
            assert len(expected) - 1 - history.rounds <= kept <= max(len(expected) - 1, 0)


TRAFFIC = st.fixed_dictionaries(
    {
        "mtp_step": st.sampled_from([0, 1, 3, 5]),
        "delay": st.integers(0, 2),
        "max_batch": st.integers(1, 5),
        "num_blocks": st.integers(8, 45),
        "block_size": st.sampled_from([4, 7, 16]),
        "host_records": st.integers(0, 3),
        "host_blocks": st.integers(0, 40),
        "real_host_blocks": st.sampled_from([None, None, 0, 3]),
        "copy_delay": st.integers(0, 3),
        "has_policies": st.booleans(),
        "tokens_ahead": st.sampled_from([0, 0, 10, 64]),
        "num_priorities": st.sampled_from([1, 3]),
        "abort_rate": st.sampled_from([0.0, 0.0, 0.05]),
        "accept": st.sampled_from([None, None, 0]),
        "seed": st.integers(0, 10_000),
    }
)


def run_traffic(num_requests: int, traffic: dict[str, Any]) -> Scheduler:
    """Random requests on a tiny pool; the tokens of each must be those that it gives alone."""
    rng = random.Random(traffic["seed"])
    mtp_step = traffic["mtp_step"]
    policies: dict[str, Any] = {
        "depth": lambda *_: rng.randint(0, mtp_step),
        "is_two_phase": lambda: rng.random() < 0.5,
    }
    sizes = ("mtp_step", "max_batch", "num_blocks", "block_size", "host_records", "host_blocks")
    scheduler = make_scheduler(
        max_in_flight=traffic["delay"],
        max_model_len=400,
        **{name: traffic[name] for name in sizes},
        **(policies if traffic["has_policies"] else {}),
    )
    # With fewer tokens ahead than usual, requests are preempted all the time.
    scheduler._planner.admission.tokens_ahead = traffic["tokens_ahead"]
    runner = FakeRunner(
        scheduler,
        traffic["delay"],
        traffic["seed"],
        accept=traffic["accept"],
        copy_delay=traffic["copy_delay"],
        host_blocks=traffic["real_host_blocks"],
    )
    longest, log = scheduler.limits.longest, Log()
    requests: list[Request] = []
    waiting = num_requests
    for index in range(1500 * num_requests):
        while waiting and (rng.random() < 0.3 or not scheduler.has_unfinished()):
            waiting -= 1
            add_random(scheduler, rng, requests, traffic["num_priorities"])
        if not (waiting or scheduler.has_unfinished()):
            break
        if rng.random() < traffic["abort_rate"] and requests:
            name = rng.choice(requests).request_id
            if scheduler.is_live(name):
                scheduler.abort(name)
                scheduler.check_integrity()
        log.take(masked_step(scheduler, runner))
        assert index < 1500 * num_requests - 1, "the requests do not end"
    while runner.copies:
        runner.run(None)
        scheduler.update(None if (plan := scheduler.schedule()) is None else runner.run(plan))
    log.check(requests, longest)
    assert scheduler.pool.num_used == scheduler.num_running == scheduler.num_waiting == 0
    return scheduler


def add_random(scheduler: Scheduler, rng: random.Random, requests: list[Request], priorities: int) -> None:
    prompt_len = rng.randint(1, max(scheduler.limits.longest - 1, 1))
    if rng.random() < 0.7:
        prompt_len = rng.randint(1, max(scheduler.limits.longest // 3, 1))
    if prompt_len >= scheduler.limits.longest:
        return
    kind = rng.choice(["plain", "plain", "guided", "logprobs"])
    fields: dict[str, Any] = {"logprobs": 2} if kind == "logprobs" else {}
    seed = len(requests)
    fields["ignore_eos"] = rng.random() < 0.7
    fields["include_drafts"] = rng.random() < 0.4
    request = make_request(str(seed), prompt_len, rng.choice([5, 50, 300]), seed=seed, **fields)
    if kind == "guided":
        request.guide = Recorder(seed)
    request.priority = rng.randrange(priorities)
    scheduler.add(request)
    requests.append(request)


@given(traffic=TRAFFIC)
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_random_traffic_on_a_tiny_pool_gives_the_tokens_of_each_request_alone(
    traffic: dict[str, Any],
) -> None:
    run_traffic(6, traffic)


def start(num_blocks: int, sizes: Sequence[tuple[int, int]], **numbers: Any) -> tuple[Scheduler, FakeRunner]:
    """A scheduler of few blocks of 16 tokens, and requests "0", "1", ... of (prompt_len, max_tokens)."""
    defaults = {"block_size": 16, "max_model_len": 2000, "max_batch": 8, "prefill_chunk": 64}
    scheduler = make_scheduler(**(defaults | {"num_blocks": num_blocks} | numbers))
    runner = FakeRunner(scheduler, scheduler.limits.max_in_flight)
    for index, (prompt_len, max_tokens) in enumerate(sizes):
        scheduler.add(make_request(str(index), prompt_len, max_tokens, seed=index, ignore_eos=True))
    return scheduler, runner


def run_all(scheduler: Scheduler, runner: FakeRunner) -> Log:
    log = Log()
    while scheduler.has_unfinished():
        log.take(step(scheduler, runner))
    return log


@pytest.mark.parametrize("host_records", [0, 8])
@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("mtp_step", [0, 3])
def test_eight_requests_on_a_pool_for_one_and_a_half_all_finish_in_order(
    host_records: int, delay: int, mtp_step: int
) -> None:
    host = {"host_records": host_records, "host_blocks": host_records * 20}
    scheduler, runner = start(22, [(20, 200)] * 8, max_in_flight=delay, mtp_step=mtp_step, **host)
    log = run_all(scheduler, runner)
    assert list(log.last) == [str(index) for index in range(8)]
    assert [len(tokens) for tokens in log.tokens.values()] == [200] * 8
    assert (scheduler.num_offloaded > 0) == (host_records > 0)
    assert (scheduler.num_recomputed > 0) == (host_records == 0)
    if host_records == 0 and mtp_step:
        assert runner.num_uploaded > 0
    # At most one preemption per 64 gained tokens.
    assert scheduler.num_offloaded + scheduler.num_recomputed <= 8 * 200 / 64


def test_a_request_without_output_waits_again_and_nothing_is_replayed() -> None:
    # The second takes all free blocks, and the first soon needs one.
    chunks = {"prefill_chunk": 16, "num_snapshots": 2}
    scheduler, runner = start(12, [(20, 120), (130, 5)], max_in_flight=0, **chunks)
    scheduler._planner.admission.tokens_ahead = -200
    while phase_of(scheduler, "1") is not RequestPhase.PREFILLING:
        step(scheduler, runner)
    log = Log()
    while phase_of(scheduler, "1") is RequestPhase.PREFILLING:
        runner.accept = 3
        log.take(step(scheduler, runner))
    log.take(stream(scheduler, runner))
    assert [len(log.tokens[name]) for name in "01"] == [len(log.tokens["0"]), 5]
    assert runner.num_uploaded == 0
    # The prefix cache counts it once.
    assert (scheduler.num_recomputed, scheduler.prefix.num_lookups) == (1, 2)


def test_many_that_ask_for_much_and_need_little_run_together() -> None:
    # The pool holds the worst case of eight.
    scheduler, runner = start(257, [(20, 480)] * 32, max_batch=32, max_in_flight=1)
    most = 0
    for _ in range(80):
        step(scheduler, runner)
        most = max(most, scheduler.num_running)
    assert most > 20


def test_a_lower_priority_starts_sooner_and_no_request_waits_for_ever() -> None:
    scheduler, runner = start(200, [], max_batch=1, max_in_flight=0, mtp_step=0)
    for index in range(40):
        request = make_request(str(index), 3, 2, seed=index, ignore_eos=True)
        request.priority = 5 if index == 0 else -index % 3
        scheduler.add(request)
    ended = list(run_all(scheduler, runner).last)
    # The eighth admission goes to the request that has waited longest, whatever its priority.
    assert ended.index("0") == 7
    others = [name for name in ended if name != "0"]
    sooner = [name for name in others if int(name) % 3 == 0]
    assert [name for name in others[:9] if name in sooner] == sooner[: len(set(others[:9]) & set(sooner))]
    assert ended[:7] == sooner[:7]


def test_the_oldest_request_is_found_without_a_scan_of_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """While there is no room, the queue is asked at every step; the answer equals that of a full scan."""
    line, rng, looks = WaitingQueue(), random.Random(3), [0]
    waiting, running = list[ScheduledRequest](), list[ScheduledRequest]()

    def look(self: WaitingQueue) -> Iterator[ScheduledRequest]:
        looks[0] += 1
        return (scheduled for _, scheduled in self._sorted)

    monkeypatch.setattr(WaitingQueue, "__iter__", look)
    for index in range(600):
        scheduled = ScheduledRequest(make_request(str(index), 3, 2), arrival=index)
        scheduled.request.priority = rng.randrange(3)
        waiting.append(scheduled)
        line.add(scheduled)
        if rng.random() < 0.2:
            line.discard(gone := waiting.pop(rng.randrange(len(waiting))))
            running.append(gone)
        if running and rng.random() < 0.1:
            # Preempted: it may be older than all others.
            waiting.append(again := running.pop(rng.randrange(len(running))))
            line.add(again)
        line._num_taken = 7
        assert all(line.first() is min(waiting, key=lambda one: one.arrival) for _ in range(3))
    assert looks[0] < 100


def test_a_request_that_was_due_is_not_preempted_for_others() -> None:
    scheduler, runner = start(14, [], max_batch=3, max_in_flight=0, mtp_step=0)
    scheduler._planner.admission.tokens_ahead = 0
    old = make_request("old", 10, 150, seed=99, ignore_eos=True)
    old.priority = 9
    scheduler.add(old)
    for index in range(60):
        scheduler.add(make_request(str(index), 30, 40, seed=index, ignore_eos=True))
    order = list(run_all(scheduler, runner).last)
    assert order.index("old") < 40


def test_a_replayed_token_that_differs_ends_its_request_by_name() -> None:
    scheduler, runner = start(31, [(20, 300)] * 3, max_in_flight=1)
    log = Log()
    while not scheduler.num_recomputed:
        log.take(step(scheduler, runner))
    (victim,) = scheduler._planner.admission.waiting.values()
    assert victim.replay is not None
    known = list(victim.replay.known)
    known[10] += 1
    victim.replay.known = tuple(known)
    victim.request.output_token_ids[10] += 1
    runner.checks_uploads = False
    log.take(stream(scheduler, runner))
    output = log.last[victim.request.request_id]
    assert output.finish_reason == "error"
    assert output.error is not None
    assert output.error.startswith(
        f"a replayed token must equal the original, got {known[10] - 1} for {known[10]}"
    )
    assert "at output token 10;" in output.error
    assert {log.last[name].finish_reason for name in "012" if name != output.request_id} == {"length"}


def test_what_the_pool_alone_cannot_hold_ends_with_length_and_says_so() -> None:
    scheduler, runner = start(4, [(20, 300), (20, 10)], max_in_flight=1)
    log = run_all(scheduler, runner)
    ends = [(len(log.tokens[name]), log.last[name].finish_reason, log.last[name].error) for name in "01"]
    assert ends == [
        (28, "length", "3 blocks of 16 tokens hold no more of it; raise num_blocks"),
        (10, "length", None),
    ]


@pytest.mark.parametrize("fault", ["abort", "fail_next", "lose_next", "recover", "forget"])
@pytest.mark.parametrize("direction", ["host", "slot"])
@pytest.mark.parametrize("delay", [0, 1])
def test_a_fault_in_the_middle_of_a_move_loses_nothing(fault: str, direction: str, delay: int) -> None:
    host = {"host_records": 3, "host_blocks": 60}
    scheduler, runner = start(31, [(20, 300)] * 4, max_in_flight=delay, **host)
    runner.copy_delay = 3
    log = Log()
    while not any(
        one.transfer is not None
        and one.transfer.copy_id is not None
        and one.transfer.target.tier == direction
        for one in scheduler._resources.moving
    ):
        log.take(step(scheduler, runner))
    *_, moving = scheduler._resources.moving
    name = moving.request.request_id
    gone = set()
    if fault == "abort":
        scheduler.abort(name)
    elif fault == "forget":
        scheduler.forget([name])
        gone = {name}
    elif fault == "recover":
        scheduler.recover("interrupted")
        runner.drop()
    else:
        setattr(runner, fault, True)
    scheduler.check_integrity()
    log.take(stream(scheduler, runner))
    while runner.copies:
        step(scheduler, runner)
    assert set(log.last) == {"0", "1", "2", "3"} - gone
    for index in range(4):
        tokens = [token_at(index, i) for i in range(300)]
        got = log.tokens.get(str(index), [])
        assert got == tokens[: len(got)]
        if str(index) in log.last and log.last[str(index)].finish_reason == "length":
            assert len(got) == 300
    assert "length" in {output.finish_reason for output in log.last.values()} or fault == "recover"
    assert scheduler.pool.num_used == scheduler._resources.host_pool.num_used == 0


def test_a_host_tier_that_turns_out_smaller_is_used_as_far_as_it_goes() -> None:
    host = {"host_records": 8, "host_blocks": 200}
    scheduler, runner = start(31, [(20, 300)] * 8, max_in_flight=1, **host)
    runner.host_blocks = 12
    log = run_all(scheduler, runner)
    assert [len(tokens) for tokens in log.tokens.values()] == [300] * 8
    assert scheduler.num_offloaded > 1
    assert scheduler.num_recomputed > 0


WIDE = {"max_drafts": 15, "wide_drafts": 15, "wide_requests": 1}


def test_one_request_has_wider_rounds_than_several() -> None:
    limits = make_scheduler(**WIDE).limits
    assert [limits.most_drafts(count) for count in (1, 2, 3)] == [15, 3, 3]
    scoring = replace(limits, given=((3, 3), (7, 2)))
    assert [scoring.most_drafts(count) for count in (1, 2, 3)] == [15, 7, 3]


def test_a_replayed_request_is_admitted_when_its_known_tokens_fit() -> None:
    """Else it would be preempted again before it gains a token."""
    scheduler, runner = start(131, [(20, 900)] * 3, max_in_flight=1, block_size=8, max_batch=4)
    runner.accept = 1
    run_all(scheduler, runner)
    assert 0 < scheduler.num_recomputed <= 5
