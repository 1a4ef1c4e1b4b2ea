"""The prefix cache against a runner that checks whose state and keys every launch reads."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from compiled_mtp.plan import Admit, Copy, StepPlan
from compiled_mtp.request import Request, RequestOutput, SamplingParams
from compiled_mtp.scheduler import Scheduler
from compiled_mtp.scheduler.scheduled_request import ScheduledRequest
from tests.fake_runner import FakeRunner
from tests.scheduler.prefixes import CHUNK, make, request_of, run
from tests.scheduler.test_scheduler import SchedulerMachine
from tests.scheduling import expected_tokens, finish_all, make_request, make_scheduler, step, stream


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 15, 16, 17, 30, 32, 33])
def test_a_prompt_that_comes_again_resumes_at_the_last_end_before_its_last_token(
    length: int, delay: int
) -> None:
    scheduler, runner = make(delay)
    first, again = make_request("a", length, 6, 1), make_request("b", length, 6, 2)
    assert run(scheduler, runner, first) == [0]
    before = len(runner.plans)
    assert run(scheduler, runner, again) == [(length - 1) // CHUNK * CHUNK]
    chunks = [plan for plan in runner.plans[before:] if plan.kind == "prefill"]
    assert [plan.prompt_chunks[0].start for plan in chunks] == [(length - 1) // CHUNK * CHUNK]
    # The slot is admitted, with the request's own seed, before it is filled.
    kinds = [type(move) for move in chunks[0].moves]
    assert kinds[-2:] == ([Admit, Copy] if length > CHUNK else kinds[-2:])
    assert scheduler.pool.num_used == 0


def test_a_prompt_whose_log_probabilities_are_wanted_counts_no_shared_blocks() -> None:
    """It resumes nowhere: admission must not expect its blocks from another request."""
    scheduler, runner = make()
    prompt = list(range(100, 124))
    scheduler.add(request_of("a", prompt, 20))
    while not scheduler.take_outputs():
        scheduler.update(runner.run(scheduler.schedule()))
    counts = []
    for prompt_logprobs in (None, 0):
        request = request_of("b", prompt, prompt_logprobs=prompt_logprobs)
        counts.append(scheduler.prefix.count_shared(ScheduledRequest(request)))
    # Two chunks of two blocks each.
    assert counts == [4, 0]


def test_a_chat_that_grows_resumes_at_the_end_of_the_turn_before() -> None:
    scheduler, runner = make()
    prompt = list(range(100, 120))
    cached = []
    for turn in range(5):
        request = request_of(str(turn), prompt, 7, turn)
        cached += run(scheduler, runner, request)
        # The answer is prefilled with the next turn: decoded tokens are not cached.
        prompt = [*prompt, *request.output_token_ids, *range(500 + turn, 504 + turn)]
    assert cached == [0, 16, 24, 40, 48]


def test_prompts_that_part_share_what_is_before_the_parting() -> None:
    scheduler, runner = make(num_snapshots=1)
    common = list(range(100, 120))
    tails = [[n] * 9 for n in (1, 2, 3)]
    # One snapshot, at the first prompt's end; the second prompt shows where they part, and the third resumes
    # there.
    requests = [request_of(str(i), common + tail, seed=i) for i, tail in enumerate(tails)]
    assert [run(scheduler, runner, one)[0] for one in requests] == [0, 0, 16]


def test_live_requests_hold_the_same_blocks() -> None:
    scheduler, runner = make(max_batch=3, mtp_step=0)
    run(scheduler, runner, make_request("a", 33, 4))
    for name in "bc":
        scheduler.add(make_request(name, 33, 30, ord(name), ignore_eos=True))
    while len(scheduler.running) < 2:
        step(scheduler, runner)
    one, other = (scheduled.block_ids for scheduled in scheduler._resources.owners.values())
    assert one[:8] == other[:8]
    assert set(one[8:]).isdisjoint(other[8:])
    assert scheduler.pool.num_used == len({*one, *other})
    scheduler.abort("b")
    stream(scheduler, runner)
    assert scheduler.pool.num_used == 0
    assert scheduler.pool.num_kept == 8


@pytest.mark.parametrize("delay", [0, 1])
def test_rounds_are_the_same_with_and_without_a_hit(delay: int) -> None:
    scheduler, _ = make(delay)
    metrics = []
    saved: tuple[Any, Any] = ({}, {})
    for name in "ab":
        # Both accept the same drafts.
        runner = FakeRunner(scheduler, delay, seed=4)
        runner.kv, runner.rows = saved
        request = make_request(name, 30, 25, 3, ignore_eos=True)
        run(scheduler, runner, request)
        metrics.append(request.metrics)
        saved = (runner.kv, runner.rows)
    assert [one.cached_tokens for one in metrics] == [0, 24]
    assert metrics[0].rounds_by_accepted == metrics[1].rounds_by_accepted


@pytest.mark.parametrize("delay", [0, 1])
def test_of_two_equal_chunks_the_first_stays(delay: int) -> None:
    scheduler, runner = make(delay, max_batch=2)
    # The second is computed whole too, because its log probabilities are requested.
    requests = [make_request(name, 20, 1, ord(name), prompt_logprobs=0) for name in "ab"]
    assert run(scheduler, runner, *requests) == [0, 0]
    assert scheduler.pool.num_kept == 4
    assert scheduler._resources.prefix.index.num_snapshots_used == 2


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("steps", range(6))
def test_a_prompt_that_ends_before_its_first_token_leaves_nothing(steps: int, delay: int) -> None:
    scheduler, runner = make(delay)
    scheduler.add(make_request("a", 30, 9))
    for _ in range(steps):
        step(scheduler, runner)
    is_read = bool(scheduler.running) and next(iter(scheduler.running.values())).output_token_ids
    scheduler.abort("a")
    scheduler.check_integrity()
    assert run(scheduler, runner, make_request("b", 30, 9)) == [24 if is_read else 0]


@pytest.mark.parametrize("delay", [0, 1])
def test_logits_that_are_not_finite_leave_nothing(delay: int) -> None:
    scheduler, runner = make(delay)
    runner.broken = {(1, 0)}
    scheduler.add(make_request("a", 30, 9, 1))
    assert [o.finish_reason for o in stream(scheduler, runner)] == ["error"]
    assert scheduler.pool.num_kept == 0
    assert run(scheduler, runner, make_request("b", 30, 9, 2)) == [0]


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("lost", range(5))
@pytest.mark.parametrize("is_late", [False, True])
def test_a_lost_plan_leaves_no_wrong_entry(lost: int, delay: int, is_late: bool) -> None:
    scheduler, runner = make(delay)
    run(scheduler, runner, make_request("z", 17, 2))
    scheduler.add(make_request("a", 40, 9, 1))
    for index in range(lost + 1):
        runner.lose_next, runner.fail_next = (index == lost and not is_late), (index == lost and is_late)
        step(scheduler, runner)
    stream(scheduler, runner)
    assert run(scheduler, runner, make_request("b", 40, 9, 2)) in ([16], [32])


def test_to_recover_is_to_forget_everything() -> None:
    scheduler, runner = make()
    run(scheduler, runner, make_request("a", 30, 9))
    scheduler.add(make_request("b", 40, 9))
    step(scheduler, runner)
    runner.drop()
    scheduler.recover("interrupted")
    scheduler.check_integrity()
    assert scheduler.pool.num_kept == 0
    assert run(scheduler, runner, make_request("c", 30, 9)) == [0]


def test_another_salt_is_another_prompt() -> None:
    scheduler, runner = make()
    salts = (None, "", "x", "x", None)
    prompt = list(range(20))
    requests = [request_of(str(i), prompt, cache_salt=salt) for i, salt in enumerate(salts)]
    assert [run(scheduler, runner, request)[0] for request in requests] == [0, 0, 0, 16, 16]


def test_a_prompt_with_log_probabilities_is_computed_whole_and_still_leaves_its_prefix() -> None:
    scheduler, runner = make()
    whole = {"prompt_logprobs": 0}
    requests = [
        make_request(name, 20, 4, **fields) for name, fields in (("a", whole), ("b", whole), ("c", {}))
    ]
    assert [run(scheduler, runner, request)[0] for request in requests] == [0, 0, 16]


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("num_choices", [2, 3])
def test_choices_share_the_prompt_that_the_first_of_them_computes(delay: int, num_choices: int) -> None:
    scheduler, runner = make(delay)
    params = SamplingParams(max_tokens=6, seed=1, ignore_eos=True)
    choices = [Request("a", list(range(100, 133)), params, index=index) for index in range(num_choices)]
    scheduler.add(*choices)
    stream(scheduler, runner)
    assert [one.history.cached_tokens for one in choices] == [0] + [32] * (num_choices - 1)


def test_the_blocks_of_a_shared_prefix_count_once() -> None:
    # The prompt has 19 blocks of 4, of which 18 are of whole chunks: alone each would need most of the pool.
    scheduler, runner = make(1, num_blocks=45, max_model_len=400, num_snapshots=9, max_batch=4)
    requests = [request_of(str(index), list(range(100, 175)), 9, index) for index in range(3)]
    for request in requests:
        scheduler.add(request)
    most = 0
    while scheduler.has_unfinished():
        step(scheduler, runner)
        most = max(most, scheduler.num_running)
    assert most == 3
    assert scheduler.num_recomputed == 0


def test_a_waiting_request_is_looked_up_again_only_after_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Admission may ask at every step how much of a prompt of thousands of chunks others hold."""
    scheduler, runner = make(1, num_blocks=20, max_batch=2)
    index, counts = scheduler.prefix.index, list[int]()
    count_shared = index.count_shared

    def note(keys: Sequence[bytes]) -> int:
        counts.append(count_shared(keys))
        return counts[-1]

    monkeypatch.setattr(index, "count_shared", note)
    # This looks the request up too.
    monkeypatch.setattr(scheduler.prefix, "check_integrity", lambda: None)
    scheduler.add(request_of("a", list(range(100, 120)), 50, 1))
    scheduler.add(request_of("b", [*range(100, 120), *range(40)], 4, 2))
    steps = 0
    while scheduler.is_live("a"):
        step(scheduler, runner)
        steps += scheduler.num_waiting > 0
    # Nothing is shared at first; then the blocks of the first chunks, once they can be found.
    assert counts == [0, 4]
    assert steps > 10
    stream(scheduler, runner)


def test_prompt_metrics_and_logprobs_stay_when_the_prompt_is_replayed() -> None:
    scheduler = make_scheduler(
        max_in_flight=0, num_blocks=41, block_size=8, max_model_len=300, max_batch=2, num_snapshots=8
    )
    runner = FakeRunner(scheduler, 0, accept=1)
    prompt = list(range(100, 140))
    requests = [request_of("a", prompt, 250, 1), request_of("b", prompt, 250, 2, prompt_logprobs=1)]
    for request in requests:
        scheduler.add(request)
    told_at: list[int] = []
    while scheduler.has_unfinished():
        for output in step(scheduler, runner):
            if output.prompt_logprobs is not None:
                told_at.append(len(runner.plans))
    assert scheduler.num_recomputed > 0
    (told,) = told_at
    assert not any(plan.next_ids for plan in runner.plans[told:])
    assert [request.history.cached_tokens for request in requests] == [0, 0]
    assert scheduler.prefix.num_lookups == 1


def test_cached_blocks_that_a_request_needs_are_evicted_the_oldest_first() -> None:
    scheduler, runner = make(num_blocks=21, mtp_step=0, delay=0)
    prompts = [[n] * 17 for n in range(3)]
    for i, prompt in enumerate(prompts):
        run(scheduler, runner, request_of(str(i), prompt))
    assert scheduler.pool.num_kept == 12
    run(scheduler, runner, request_of("again", prompts[0], 2))
    # 14 blocks of 20: eight are empty.
    run(scheduler, runner, request_of("big", list(range(50)), 6))
    index = scheduler._resources.prefix.index
    assert index.num_evictions > 0
    cached = [
        run(scheduler, runner, request_of(f"late {i}", prompt, 2))[0] for i, prompt in enumerate(prompts)
    ]
    assert cached == [16, 0, 0]


def test_a_long_prompt_loses_its_own_snapshots_before_those_of_others() -> None:
    scheduler, runner = make(num_snapshots=6, num_blocks=200, max_model_len=300)
    for i in range(3):
        run(scheduler, runner, request_of(str(i), [i] * 10, 2))
    run(scheduler, runner, make_request("long", 250, 2))
    others = [run(scheduler, runner, request_of(f"again {i}", [i] * 10, 2))[0] for i in range(3)]
    assert others == [8, 8, 8]
    # It has kept its end, and chunks at multiples of powers of two.
    index = scheduler._resources.prefix.index
    numbers = sorted(chunk.number for chunk in index._chunks.values() if chunk.snapshot is not None)
    assert numbers == [1, 1, 1, 16, 24, 31]
    assert run(scheduler, runner, make_request("half", 140, 2)) == [128]


def test_an_inner_snapshot_is_evicted_and_its_blocks_stay() -> None:
    scheduler, runner = make(num_snapshots=1)
    run(scheduler, runner, make_request("a", 30, 2))
    assert scheduler.pool.num_kept == 6
    assert run(scheduler, runner, make_request("b", 30, 2), make_request("c", 20, 2)) == [24, 0]


def test_a_snapshot_needs_chunks_of_whole_blocks() -> None:
    with pytest.raises(
        ValueError, match="prefill_chunk must be a multiple of block_size=5 with a prefix cache"
    ):
        make_scheduler(block_size=5, num_snapshots=1)


class PrefixMachine(SchedulerMachine):
    """The base class with prompts that begin like others: shared, growing, of two salts, in small pools."""

    @initialize(
        mtp_step=st.integers(0, 3),
        delay=st.integers(0, 1),
        max_batch=st.integers(1, 4),
        num_blocks=st.integers(8, 60),
        block_size=st.sampled_from([1, 2, 4, 8]),
        max_model_len=st.integers(20, 80),
        prefill_chunk=st.sampled_from([8, 40]),
        prefix_step=st.just(8),
        max_prompt_chunks=st.integers(1, 4),
        num_snapshots=st.integers(1, 7),
        prefix_host_records=st.integers(0, 6),
        prefix_host_blocks=st.sampled_from([0, 8, 16, 48]),
        copy_delay=st.integers(0, 2),
        has_policies=st.booleans(),
        seed=st.integers(0, 1000),
    )
    def start(self, delay: int, copy_delay: int, has_policies: bool, seed: int, **numbers: int) -> None:
        super().start(delay, copy_delay, has_policies, seed, **numbers)

    @rule(
        data=st.data(),
        tail=st.integers(1, 24),
        max_tokens=st.integers(1, 30),
        salt=st.sampled_from([None, None, "x"]),
        seed=st.integers(0, 3),
    )
    def add(self, data: st.DataObject, tail: int, max_tokens: int, salt: str | None, seed: int) -> None:
        before: list[int] = []
        if self.requests:
            known = self.requests[data.draw(st.sampled_from(sorted(self.requests)))]
            before = known.prompt_token_ids + known.output_token_ids
            before = before[: data.draw(st.integers(0, len(before)))]
        rng = random.Random(seed)
        prompt = before + [rng.randint(100, 101) for _ in range(tail)]
        name = str(len(self.requests))
        request = request_of(name, prompt, max_tokens, len(self.requests), cache_salt=salt)
        try:
            self.scheduler.add(request)
        except ValueError:
            return
        self.requests[name], self.tokens[name] = request, []

    @precondition(lambda self: self.requests)
    @rule()
    def interrupt(self) -> None:
        self.runner.drop()
        self.scheduler.recover("interrupted")
        self.take(self.scheduler.take_outputs())

    @rule()
    def refuse_host_memory(self) -> None:
        self.runner.fails_evictions = True
        self.step()
        self.runner.fails_evictions = False

    @rule()
    def break_next(self) -> None:
        self.runner.broken.add((len(self.requests), 0))

    @rule(count=st.integers(5, 30))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()


TestPrefixMachine = PrefixMachine.TestCase
TestPrefixMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def churn(num_requests: int, seed: int, *, has_host_tier: bool = False) -> Scheduler:
    """Random chats of several salts, some aborted, one after the other and together, in a small pool."""
    rng = random.Random(seed)
    delay, host = rng.randint(0, 1), {"prefix_host_records": 4, "prefix_host_blocks": 12}
    sizes = {"num_blocks": 45, "num_snapshots": 5, "mtp_step": 2, "max_batch": 3}
    scheduler, runner = make(delay, **sizes, **(host if has_host_tier else {}))
    chats: list[list[int]] = [[]]
    live: dict[str, Request] = {}
    ended: dict[str, RequestOutput] = {}
    for number in range(num_requests):
        chat = rng.choice(chats)
        kept = len(chat) if rng.random() < 0.7 else rng.randint(0, len(chat))
        prompt = chat[:kept] + [rng.randint(100, 102) for _ in range(rng.randint(1, 12))]
        request = request_of(str(number), prompt[:80], rng.randint(1, 12), number)
        scheduler.add(request)
        live[request.request_id] = request
        while scheduler.num_waiting > 2:
            ended |= {o.request_id: o for o in step(scheduler, runner) if o.finish_reason}
        if rng.random() < 0.1:
            scheduler.abort(name := rng.choice([n for n in live if scheduler.is_live(n)]))
            live.pop(name)
        for name in [name for name in live if name in ended]:
            request = live.pop(name)
            assert request.output_token_ids == expected_tokens(request, 100)
            chats = [[], *chats[-4:], request.prompt_token_ids + request.output_token_ids]
        ended.clear()
        runner.plans = runner.plans[-3:]
    stream(scheduler, runner)
    return scheduler


@pytest.mark.parametrize("has_host_tier", [False, True])
def test_nothing_is_lost_over_many_requests(has_host_tier: bool) -> None:
    scheduler = churn(150, 1, has_host_tier=has_host_tier)
    prefix = scheduler._resources.prefix
    assert scheduler.pool.num_used == 0
    assert prefix.num_hits > 30
    assert (prefix.num_host_hits > 10) == has_host_tier
    assert prefix.index.num_evictions > 30


def test_finish_all_leaves_no_pending_insert() -> None:
    scheduler, runner = make()
    for i in range(4):
        scheduler.add(make_request(str(i), 20 + i, 9, i))
    finish_all(scheduler, runner)
    assert scheduler._resources.prefix._pending == {}


def saves(plans: list[StepPlan]) -> int:
    return sum(len(plan.saves) for plan in plans)


def test_a_hit_saves_no_snapshot_again() -> None:
    scheduler, runner = make()
    run(scheduler, runner, make_request("a", 33, 2))
    assert saves(runner.plans) == 4
    run(scheduler, runner, make_request("b", 33, 2), make_request("c", 20, 2))
    assert saves(runner.plans) == 4
