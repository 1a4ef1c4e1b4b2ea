"""Requests with grammars, log probabilities or several choices among others: the order of their plans."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from compiled_mtp.plan import StepPlan
from compiled_mtp.request import Request, RequestOutput
from compiled_mtp.scheduler import Scheduler
from tests.fake_runner import FakeRunner, token_at
from tests.scheduling import expected_tokens, make_request, make_scheduler


class Recorder:
    """A grammar that takes every token and remembers it; broken or ended after `limit` tokens."""

    def __init__(self, limit: int = 1000, is_broken: bool = False) -> None:
        self.limit, self.is_broken = limit, is_broken
        self.taken: list[int] = []
        self.is_ended, self.error = False, None

    def reset(self) -> None:
        raise AssertionError("nothing is replayed here")

    def accept(self, token_ids: Sequence[int]) -> int:
        for index, token_id in enumerate(token_ids):
            if len(self.taken) == self.limit and self.is_broken:
                self.error = "the grammar cannot go on"
                return index
            self.taken.append(token_id)
            if len(self.taken) == self.limit and not self.is_broken:
                self.is_ended = True
                return index + 1
        return len(token_ids)


def guided(name: str, prompt_len: int, max_tokens: int, seed: int, guide: Recorder | None = None) -> Request:
    request = make_request(name, prompt_len, max_tokens, seed=seed, ignore_eos=True)
    request.guide = guide or Recorder()
    return request


def drive(
    scheduler: Scheduler, runner: FakeRunner, requests: list[Request], seed: int
) -> list[RequestOutput]:
    """Add the requests at random times and step to the end, masks made as the engine makes them."""
    rng, waiting, outputs = random.Random(seed), list(requests), []
    for _ in range(3000):
        while waiting and (rng.random() < 0.4 or not scheduler.has_unfinished()):
            scheduler.add(waiting.pop(0))
        if not (waiting or scheduler.has_unfinished()):
            return outputs
        plan = scheduler.schedule()
        scheduler.check_integrity()
        if plan is not None and plan.is_guided:
            check_windows(scheduler, runner, plan)
        scheduler.update(runner.run(plan))
        scheduler.check_integrity()
        outputs += scheduler.take_outputs()
    raise AssertionError("the requests do not end")


def check_windows(scheduler: Scheduler, runner: FakeRunner, plan: StepPlan) -> None:
    """Every token that the device has accepted is known when masks are made, and the drafts are its own."""
    windows = {window.row: window for window in scheduler.windows(plan)}
    for index, (slot, generation) in enumerate(zip(plan.slots, plan.generations, strict=True)):
        scheduled = scheduler._resources.owners.get(slot)
        if scheduled is None or scheduled.generation != generation or scheduled.request.guide is None:
            continue
        window = windows.pop(index * (plan.shape.verify + 1))
        guide = window.guide
        assert isinstance(guide, Recorder)
        row = runner.row(slot)
        num_tokens = 0 if plan.kind == "first" else row.pos - len(row.prompt) + 1
        assert guide.taken == [token_at(row.seed, i) for i in range(num_tokens)]
        assert list(window.drafts) == row.drafts[: plan.shape.verify]
    assert windows == {}


@pytest.mark.parametrize("delay", [0, 1, 2])
@pytest.mark.parametrize("seed", range(8))
def test_grammars_know_every_token_when_masks_are_made_and_tokens_do_not_change(
    delay: int, seed: int
) -> None:
    rng = random.Random(seed)
    depths = random.Random(seed + 1)
    scheduler = make_scheduler(max_in_flight=delay, num_blocks=60, depth=lambda *_: depths.randint(0, 3))
    runner = FakeRunner(scheduler, delay, seed)
    requests: list[Request] = []
    for index in range(7):
        size = (str(index), rng.randint(1, 20), rng.randint(1, 18))
        kind = rng.choice(["plain", "guided", "logprobs"])
        if kind == "guided":
            requests.append(guided(*size, seed=index))
        else:
            fields = {"logprobs": 2} if kind == "logprobs" else {}
            requests.append(make_request(*size, seed=index, **fields))
    outputs = drive(scheduler, runner, requests, seed)
    for request in requests:
        own = [output for output in outputs if output.request_id == request.request_id]
        tokens = [token for output in own for token in output.new_token_ids]
        assert tokens == expected_tokens(request, 40)
        if request.params.logprobs is None:
            assert all(output.logprobs is None for output in own)
        else:
            entries = [entry for output in own for entry in output.logprobs or []]
            assert [entry.token_id for entry in entries] == tokens
            assert [entry.logprob for entry in entries] == [-float(token) for token in tokens]


def test_rounds_have_two_phases_only_while_a_request_needs_them() -> None:
    scheduler = make_scheduler(max_in_flight=0)
    runner = FakeRunner(scheduler, 0, accept=0)
    scheduler.add(make_request("plain", 3, 30, ignore_eos=True))
    scheduler.add(make_request("listed", 9, 4, seed=1, ignore_eos=True, logprobs=5))
    while scheduler.has_unfinished():
        scheduler.update(runner.run(scheduler.schedule()))
        scheduler.take_outputs()
    kinds = [plan.kind for plan in runner.plans]
    first = kinds.index("first")
    assert kinds[first - 1] == "prefill"
    assert not runner.plans[first - 1].ended
    assert kinds[first + 1 : first + 7] == ["verify", "accept"] * 3
    assert set(kinds[first + 7 :]) == {"decode"}
    logprobs = {plan.kind: plan.logprobs for plan in runner.plans[first : first + 7]}
    assert logprobs == {"first": 5, "verify": -1, "accept": 5}
    assert not any(plan.wants_drafts for plan in runner.plans)


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize(("is_broken", "reason"), [(False, "stop"), (True, "error")])
def test_a_grammar_ends_its_request_and_no_other(delay: int, is_broken: bool, reason: str) -> None:
    scheduler = make_scheduler(max_in_flight=delay)
    runner = FakeRunner(scheduler, delay, accept=3)
    requests = [
        guided("a", 3, 15, seed=1, guide=Recorder(5, is_broken)),
        guided("b", 3, 15, seed=2),
        make_request("c", 3, 15, seed=3, ignore_eos=True),
    ]
    outputs = drive(scheduler, runner, requests, seed=0)
    ends = {output.request_id: output for output in outputs if output.finish_reason}
    assert {name: output.finish_reason for name, output in ends.items()} == {
        "a": reason,
        "b": "length",
        "c": "length",
    }
    assert ends["a"].error == ("the grammar cannot go on" if is_broken else None)
    tokens = [token for output in outputs if output.request_id == "a" for token in output.new_token_ids]
    assert tokens == [token_at(1, index) for index in range(5)]


@pytest.mark.parametrize("delay", [0, 1])
def test_an_aborted_prompt_has_no_first_token(delay: int) -> None:
    scheduler = make_scheduler(max_in_flight=delay)
    runner = FakeRunner(scheduler, delay)
    scheduler.add(guided("a", 9, 5, seed=1))
    for _ in range(2):
        scheduler.update(runner.run(scheduler.schedule()))
    scheduler.abort("a")
    scheduler.check_integrity()
    while scheduler.has_unfinished():
        scheduler.update(runner.run(scheduler.schedule()))
        scheduler.take_outputs()
    assert {plan.kind for plan in runner.plans} == {"prefill"}


def choices_of(name: str, n: int, max_tokens: int = 9) -> list[Request]:
    found = []
    for index in range(n):
        request = make_request(name, 3, max_tokens, seed=10 + index, ignore_eos=True)
        request.index = index
        found.append(request)
    return found


def test_choices_run_on_their_own_and_end_together_at_an_abort() -> None:
    scheduler = make_scheduler(max_in_flight=1, num_blocks=60)
    runner = FakeRunner(scheduler, 1)
    choices = choices_of("n", 5)
    scheduler.add(*choices)
    with pytest.raises(ValueError, match="request_id must be unused, got 'n'"):
        scheduler.add(*choices_of("n", 1))
    tokens: dict[int, list[int]] = {}
    while scheduler.has_unfinished():
        scheduler.update(runner.run(scheduler.schedule()))
        scheduler.check_integrity()
        for output in scheduler.take_outputs():
            tokens.setdefault(output.index, []).extend(output.new_token_ids)
    assert tokens == {index: [token_at(10 + index, i) for i in range(9)] for index in range(5)}

    scheduler.add(*choices_of("n", 5))
    for _ in range(4):
        scheduler.update(runner.run(scheduler.schedule()))
    scheduler.take_outputs()
    scheduler.abort("n")
    ends = scheduler.take_outputs()
    assert sorted(output.index for output in ends) == [0, 1, 2, 3, 4]
    assert {(output.request_id, output.finish_reason) for output in ends} == {("n", "abort")}
    scheduler.check_integrity()
    assert not scheduler.has_id("n")
    scheduler.add(*choices_of("n", 2))
    scheduler.forget(["n"])
    assert not scheduler.has_unfinished()


def test_after_an_interrupt_waiting_choices_go_on() -> None:
    scheduler = make_scheduler(max_in_flight=0, max_batch=2, num_blocks=60)
    runner = FakeRunner(scheduler, 0)
    scheduler.add(*choices_of("n", 4))
    for _ in range(3):
        scheduler.update(runner.run(scheduler.schedule()))
    scheduler.take_outputs()
    scheduler.recover("interrupted")
    runner.drop()
    reasons = {}
    while scheduler.has_unfinished():
        for output in scheduler.take_outputs():
            if output.finish_reason:
                reasons[output.index] = output.finish_reason
        scheduler.update(runner.run(scheduler.schedule()))
        scheduler.check_integrity()
    assert reasons == {0: "error", 1: "error", 2: "length", 3: "length"}


def test_a_row_that_masks_every_id_ends_its_request_with_the_names_of_the_masks() -> None:
    scheduler = make_scheduler(max_in_flight=0)
    runner = FakeRunner(scheduler, 0)
    scheduler.add(
        make_request("a", 3, 9, seed=1, ignore_eos=True, allowed_token_ids=(5,), min_tokens=2),
    )
    runner.masked = {(1, 1)}
    outputs = []
    while scheduler.has_unfinished():
        scheduler.update(runner.run(scheduler.schedule()))
        outputs += scheduler.take_outputs()
    assert outputs[-1].finish_reason == "error"
    assert outputs[-1].error is not None
    assert outputs[-1].error.startswith("allowed_token_ids, min_tokens must leave a token to draw, got none")
    assert [token for output in outputs for token in output.new_token_ids] == [token_at(1, 0)]


@pytest.mark.parametrize(
    ("num_blocks", "max_tokens", "is_named"), [(31, 99, False), (6, 99, True), (6, 5, False)]
)
def test_blocks_are_named_where_they_alone_cut_a_request(
    num_blocks: int, max_tokens: int, is_named: bool
) -> None:
    """All blocks hold 20 of max_model_len's 40 tokens, or more than 40."""
    request = make_request("a", 10, max_tokens)
    make_scheduler(num_blocks=num_blocks).limits.fit(request)
    assert (request.length_reason is not None) == is_named
