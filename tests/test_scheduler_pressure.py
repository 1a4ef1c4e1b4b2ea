"""Blocks run short: requests leave and come back, or are replayed; tokens, order and ownership stay."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compiled_mtp.plan import StepPlan
from compiled_mtp.request import Request, RequestOutput
from compiled_mtp.scheduler import Scheduler
from tests.fake_runner import (
    FakeRunner,
    expected_tokens,
    make_request,
    make_scheduler,
    token_at,
)


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
    """When masks are made, grammars have taken what the device has, and drafts are those of the round."""
    for window in scheduler.windows(plan):
        row = runner.row(plan.slots[window.row // (plan.verify_step + 1)])
        assert isinstance(window.guide, Recorder)
        num_tokens = 0 if plan.kind == "first" else row.pos - len(row.prompt) + 1
        assert window.guide.num_taken == num_tokens
        assert list(window.drafts) == row.drafts[: plan.verify_step]


def masked_step(scheduler: Scheduler, runner: FakeRunner) -> list[RequestOutput]:
    """`step`, with a look at what masks would be made of."""
    plan = scheduler.schedule()
    scheduler.check_integrity()
    if plan is not None and plan.wants_drafts:
        check_windows(scheduler, runner, plan)
    scheduler.update(runner.run(plan))
    scheduler.check_integrity()
    return scheduler.take_outputs()


class Log:
    """What the callers of requests were given."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.entries: dict[str, list[int]] = {}
        self.last: dict[str, RequestOutput] = {}

    def take(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            name = output.request_id
            assert name not in self.last, "output after the end"
            self.tokens.setdefault(name, []).extend(output.new_token_ids)
            self.entries.setdefault(name, []).extend(e.token_id for e in output.logprobs or ())
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
            kept = sum(n * count for n, count in enumerate(history.rounds_by_accepted))
            # A round gives its bonus token too, but for one that a stop has cut.
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
    """Random requests on a tiny pool, each checked against what it gives alone."""
    rng = random.Random(traffic["seed"])
    mtp_step = traffic["mtp_step"]
    policies: dict[str, Any] = {
        "depth": lambda: rng.randint(0, mtp_step),
        "is_halved": lambda: rng.random() < 0.5,
    }
    sizes = ("mtp_step", "max_batch", "num_blocks", "block_size", "host_records", "host_blocks")
    scheduler = make_scheduler(
        max_in_flight=traffic["delay"],
        max_model_len=400,
        **{name: traffic[name] for name in sizes},
        **(policies if traffic["has_policies"] else {}),
    )
    # With fewer than are meant to be free, requests come and go all the time.
    scheduler._planner._admission.tokens_ahead = traffic["tokens_ahead"]
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
    request = make_request(str(seed), prompt_len, rng.choice([5, 50, 300]), seed=seed, **fields)
    if kind == "guided":
        request.guide = Recorder(seed)
    request.priority = rng.randrange(priorities)
    scheduler.add(request)
    requests.append(request)


@given(traffic=TRAFFIC)
@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
def test_random_traffic_on_a_tiny_pool_gives_the_tokens_of_each_request_alone(
    traffic: dict[str, Any],
) -> None:
    run_traffic(8, traffic)
