"""Requests and schedulers with a prefix cache, for tests."""

from __future__ import annotations

from typing import Any

from compiled_mtp.request import Request, SamplingParams
from compiled_mtp.scheduler import Scheduler
from tests.fake_runner import EOS, FakeRunner
from tests.scheduling import expected_tokens, make_scheduler, stream

CHUNK = 8


def request_of(name: str, prompt: list[int], max_tokens: int = 6, seed: int = 0, **fields: object) -> Request:
    given: dict[str, Any] = {"max_tokens": max_tokens, "seed": seed, "ignore_eos": True, **fields}
    params = SamplingParams(**given)
    return Request(name, prompt, params, eos_token_ids=frozenset({EOS}))


def run(scheduler: Scheduler, runner: FakeRunner, *requests: Request) -> list[int]:
    """Decode requests to their ends and check their tokens; return the cached tokens of each prompt."""
    for request in requests:
        scheduler.add(request)
    stream(scheduler, runner)
    limit = scheduler.limits.max_model_len
    assert [one.output_token_ids for one in requests] == [expected_tokens(one, limit) for one in requests]
    return [request.history.cached_tokens for request in requests]


def make(delay: int = 1, **numbers: int) -> tuple[Scheduler, FakeRunner]:
    defaults = {"num_snapshots": 8, "num_blocks": 60, "max_model_len": 100}
    scheduler = make_scheduler(max_in_flight=delay, **(defaults | numbers))
    return scheduler, FakeRunner(scheduler, delay)
