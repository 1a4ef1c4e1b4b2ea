"""A service under many streams: the scheduler and the depth policy as they are, the device's times simulated.

Times of rounds are those of tests/spec/machine.py, times of prompts those of docs/performance.md.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from compiled_mtp.benchmarks.serving_rows import MeanLengths
from compiled_mtp.graphs.buckets import (
    RoundShape,
    ladder,
    lay_out,
    pick_prefill_length,
    prefill_lengths,
    prompt_chunk_limit,
)
from compiled_mtp.plan import StepPlan, StepResult
from compiled_mtp.request import Request, SamplingParams
from compiled_mtp.scheduler import Scheduler, planner
from compiled_mtp.scheduler.limits import Limits
from compiled_mtp.spec.policy import DepthPolicy
from tests.spec.machine import DEPTHS, MANY, rate_for

SHORT, LONG = MeanLengths(200, 200), MeanLengths(2000, 200)
CHUNK = 2048
# Milliseconds of a launch of prompts, and of each of its rows: 27B takes 0.75 s for 8,192.
PROMPT_MS, ROW_MS = 10.0, 0.09
ACCEPT = rate_for(2.6)


@dataclass
class Load:
    """What a run took and gave; seconds of the simulated device."""

    seconds: float = 0.0
    tokens: int = 0
    num_rounds: int = 0
    requests_in_rounds: int = 0
    prompt_rows: int = 0
    padded_rows: int = 0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def round_ms(shape: str, size: int, depth: int) -> float:
    """Linear between the sizes of MANY; rounds of fewer requests wait for weights."""
    times, sizes = MANY[shape], (64, 128, 256)
    if size <= sizes[0]:
        return times[64][depth] * (0.75 + 0.25 * size / 64)
    at = bisect_left(sizes, size)
    low, high = sizes[at - 1], sizes[at]
    return times[low][depth] + (times[high][depth] - times[low][depth]) * (size - low) / (high - low)


class Service:
    """Streams that each send a request, read it to its end and send the next."""

    def __init__(self, shape: str, streams: int, lengths: MeanLengths, depth: int | None) -> None:
        self.shape, self.now_s, self.load = shape, 0.0, Load()
        self.chance = random.Random(1)
        self.sizes = [bucket.groups for bucket in ladder(1, RoundShape(3, 3), streams)]
        self.lengths = prefill_lengths(CHUNK, has_middles=True)
        self.policy = DepthPolicy(DEPTHS, self.sizes, clock=lambda: self.now_s)
        self.limits = Limits(
            max_batch=streams,
            num_blocks=streams * lengths.longest // 16,
            block_size=16,
            max_model_len=lengths.longest + 64,
            prefill_chunk=CHUNK,
            mtp_step=max(DEPTHS),
            max_drafts=max(DEPTHS),
            max_in_flight=1,
            busy_chunk=512,
            prefix_step=64,
            max_prompt_chunks=prompt_chunk_limit(CHUNK, streams),
            prompt_lengths=self.lengths,
        )
        choose: Callable[[int, int, bool], int] = self.policy.choose if depth is None else lambda *_: depth
        self.scheduler = Scheduler(self.limits, depth=choose)
        # The lengths of requests that were not sent yet.
        self.unsent = deque(lengths.draw(3 * streams, seed=0))
        for _ in range(streams):
            self.send()

    def send(self) -> None:
        if self.unsent:
            prompt, output = self.unsent.popleft()
            params = SamplingParams(max_tokens=output, ignore_eos=True)
            request = Request(str(len(self.unsent)), [1] * prompt, params)
            self.limits.fit(request)
            self.scheduler.add(request)

    def run(self) -> Load:
        """Answer all requests, with one launch in flight."""
        flight: deque[tuple[StepPlan, float, list[list[int]]]] = deque()
        free_s = 0.0
        while self.scheduler.has_unfinished():
            plan = self.scheduler.schedule()
            self.now_s += 0.0003
            if plan is not None:
                self.policy.launch(plan)
                ms, token_ids = self.round(plan) if plan.kind == "decode" else self.prompts(plan)
                free_s = max(free_s, self.now_s) + ms / 1e3
                flight.append((plan, free_s, token_ids))
            if flight and (len(flight) > 1 or plan is None):
                done, end_s, found = flight.popleft()
                result = StepResult(done, found, is_late=end_s <= self.now_s)
                self.now_s = max(self.now_s, end_s)
                self.policy.read(result)
                self.scheduler.update(result)
                for output in self.scheduler.take_outputs():
                    self.load.tokens += len(output.new_token_ids)
                    if output.finish_reason is not None:
                        self.send()
        self.load.seconds = self.now_s
        return self.load

    def round(self, plan: StepPlan) -> tuple[float, list[list[int]]]:
        self.load.num_rounds += 1
        self.load.requests_in_rounds += len(plan.slots)
        token_ids = []
        for _ in plan.slots:
            kept = 0
            while kept < plan.num_drafts and self.chance.random() < ACCEPT:
                kept += 1
            token_ids.append([1] * (kept + 1))
        size = self.sizes[bisect_left(self.sizes, len(plan.slots))]
        return round_ms(self.shape, size, plan.shape.verify), token_ids

    def prompts(self, plan: StepPlan) -> tuple[float, list[list[int]]]:
        counts = [len(chunk.token_ids) for chunk in plan.prompt_chunks]
        rows = pick_prefill_length(self.lengths, lay_out(counts)[1], len(counts), self.limits.max_batch)
        self.load.prompt_rows += sum(counts)
        self.load.padded_rows += rows
        return PROMPT_MS + ROW_MS * rows, [[1] if chunk.is_last else [] for chunk in plan.prompt_chunks]


def run(shape: str, streams: int, lengths: MeanLengths, depth: int | None = None) -> Load:
    return Service(shape, streams, lengths, depth).run()


@pytest.mark.parametrize("streams", [64, 256])
@pytest.mark.parametrize("shape", ["27b fp8", "35b-a3b"])
def test_auto_reaches_the_best_depth_of_a_service(shape: str, streams: int) -> None:
    auto = run(shape, streams, SHORT)
    # The best of all depths is 2 for a dense model, and 5 for experts, whose weights are read anyway.
    fixed = {depth: run(shape, streams, SHORT, depth) for depth in (2, 5)}
    assert {load.tokens for load in fixed.values()} == {auto.tokens}
    assert auto.tokens_per_s > 0.96 * max(load.tokens_per_s for load in fixed.values())


def test_long_prompts_leave_rounds_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches of 512 rows prefill as many requests as end while a tenth of them decodes."""
    grown = run("27b fp8", 64, LONG)
    monkeypatch.setattr(planner, "_FEW_PROMPTS", 1 << 30)
    short = run("27b fp8", 64, LONG)
    assert short.requests_in_rounds / short.num_rounds < 24
    assert grown.requests_in_rounds / grown.num_rounds > 32
    assert grown.tokens_per_s > 1.15 * short.tokens_per_s
    assert grown.tokens == short.tokens


def test_few_rows_of_full_launches_are_empty() -> None:
    load = run("27b fp8", 64, LONG)
    assert load.prompt_rows > 0.96 * load.padded_rows
