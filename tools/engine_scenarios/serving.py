"""Throughput and latencies of a service's engine under many streams, and where the time goes.

    python tools/bench_engine.py serving --shape 4b --streams 64,256 --lengths 200:200,2000:200     # a GPU
    python tools/bench_engine.py serving --streams 4 --lengths 20:20        # the checkpoint that ships

Each of --streams clients sends a request, reads it to its end and sends the next, until --requests are done.
Prompts are random ids; lengths are lognormal with the means of --lengths. The clients are coroutines beside
an AsyncEngine in this process: the tool needs no web server, and `overhead` says what that would add.
`compiled-mtp bench serving --lengths` sends the same load over HTTP, to any server.

Seconds of a run are the sum of rounds_s, prompts_s and idle_s: a launch's time begins at its launch or at the
previous result, whichever is later, and ends at its result. idle_s: nothing was in flight. late: the share of
results that were ready before the host asked for them. padding: the share of empty places in the rounds'
buckets; prompt_padding: the share of empty rows in prompts' launches. host_us: the host's time per launch
without its waits for a GPU. Tokens of requests that run together must equal those of each alone; otherwise
nothing is printed.

--fixed-depths measures the first of --lengths again, at each of these depths in place of auto's choice, on
the same engine. Such a row names its depth as mtp_step. Drafts are a chain's alone: random ids have no text
to draft from. --beside FILE adds saved rows of the same load to each row.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import random
import statistics
import time
from bisect import bisect_left
from pathlib import Path
from typing import Any

from compiled_mtp import __version__
from compiled_mtp.async_engine import AsyncEngine
from compiled_mtp.benchmarks.released_shapes import rate_for
from compiled_mtp.benchmarks.saved_rows import read_rows
from compiled_mtp.benchmarks.serving_rows import (
    DRAWN_IDS,
    SAVED_FIELDS,
    MeanLengths,
    mean_lengths,
    percentiles,
    with_beside,
)
from compiled_mtp.engine import Engine
from compiled_mtp.graphs.buckets import lay_out, pick_prefill_length
from compiled_mtp.plan import StepPlan, StepResult
from compiled_mtp.request import SamplingParams
from compiled_mtp.server.interpreter import settle_interpreter
from compiled_mtp.spec.policy import DepthPolicy
from compiled_mtp.terminal.flags import count
from engine_scenarios import common

CHECKED, CHECKED_TOKENS = 12, 16


class FixableEngine(Engine):
    """An engine of mtp_step "auto" whose rounds have `fixed_depth`, or those of auto while it is None."""

    fixed_depth: int | None = None

    def _make_depths(self) -> DepthPolicy | None:
        policy = super()._make_depths()
        if policy is not None:
            choose = policy.choose

            def choose_or_fix(num_requests: int, context_tokens: int, is_two_phase: bool) -> int:
                chosen = choose(num_requests, context_tokens, is_two_phase)
                return chosen if self.fixed_depth is None else self.fixed_depth

            policy.choose = choose_or_fix  # type: ignore[method-assign]
        return policy


@dataclasses.dataclass
class Timeline:
    """Shares the time between results among the launches whose results they are.

    rounds: (requests, size of the bucket, depth, seconds) of each; prompts: (tokens, rows with padding,
    seconds) of each launch.
    """

    engine: Engine
    rounds: list[tuple[int, int, int, float]] = dataclasses.field(default_factory=list)
    prompts: list[tuple[int, int, float]] = dataclasses.field(default_factory=list)
    idle_s: float = 0.0
    num_late: int = 0

    def __post_init__(self) -> None:
        runner = self.engine.runner
        self._run, self._sizes = runner.run, sorted({bucket.groups for bucket in runner.programs.buckets})
        self._launched_s: dict[int, float] = {}
        self._last_s = time.perf_counter()
        runner.run = self._timed  # type: ignore[method-assign]

    def begin(self) -> None:
        """Forget what was timed."""
        self.rounds.clear()
        self.prompts.clear()
        self.idle_s, self.num_late = 0.0, 0
        self._last_s = time.perf_counter()
        self.engine.runner.waited_s = 0.0

    def _timed(self, plan: StepPlan | None) -> StepResult | None:
        if plan is not None:
            self._launched_s[plan.step_id] = time.perf_counter()
        result = self._run(plan)
        if result is not None:
            self._take(result, time.perf_counter())
        return result

    def _take(self, result: StepResult, now_s: float) -> None:
        plan = result.plan
        begin_s = max(self._launched_s.pop(plan.step_id), self._last_s)
        self.idle_s += begin_s - self._last_s
        self.num_late += result.is_late
        self._last_s, seconds = now_s, now_s - begin_s
        if plan.kind in ("decode", "verify", "accept"):
            size = self._sizes[bisect_left(self._sizes, len(plan.slots))]
            self.rounds.append((len(plan.slots), size, plan.shape.verify, seconds))
        else:
            counts = [len(chunk.token_ids) for chunk in plan.prompt_chunks]
            self.prompts.append((sum(counts), self._padded(counts), seconds))

    def _padded(self, counts: list[int]) -> int:
        """The rows of a launch of prompt chunks of so many tokens."""
        programs, (_, end) = self.engine.runner.programs, lay_out(counts)
        if not programs.has_shapes:
            return end
        return pick_prefill_length(programs.lengths, end, len(counts), programs.max_batch)

    def parts(self, seconds: float) -> dict[str, Any]:
        """Return where `seconds` went."""
        launches = len(self.rounds) + len(self.prompts)
        by_shape: dict[tuple[int, int], list[float]] = {}
        for _, size, depth, spent in self.rounds:
            by_shape.setdefault((size, depth), []).append(spent)
        by_rows: dict[int, list[float]] = {}
        for _, rows, spent in self.prompts:
            by_rows.setdefault(rows, []).append(spent)
        tokens = sum(count for count, _, _ in self.prompts)
        places = sum(size for _, size, _, _ in self.rounds)
        used = sum(count for count, _, _, _ in self.rounds)
        host_s = seconds - self.engine.runner.waited_s
        return {
            "rounds_s": round(sum(spent for *_, spent in self.rounds), 3),
            "prompts_s": round(sum(spent for *_, spent in self.prompts), 3),
            "idle_s": round(self.idle_s, 3),
            "late": round(self.num_late / launches, 3),
            "padding": round(1 - used / places, 3),
            "prompt_padding": round(1 - tokens / sum(rows for _, rows, _ in self.prompts), 3),
            "host_us": round(1e6 * host_s / launches, 1),
            "rounds": {
                f"{size} at depth {depth}": [len(found), round(1e3 * statistics.median(found), 3)]
                for (size, depth), found in sorted(by_shape.items())
            },
            "requests_per_round": round(used / len(self.rounds), 1),
            "prompt_launches": len(self.prompts),
            "tokens_per_prompt_launch": round(tokens / len(self.prompts), 1),
            "prompt_ms": {
                rows: [len(found), round(1e3 * statistics.median(found), 3)]
                for rows, found in sorted(by_rows.items())
            },
        }


@dataclasses.dataclass
class Answer:
    """Seconds of one request from its arrival to its first and last token, and its tokens."""

    first_s: float
    total_s: float
    tokens: int

    @property
    def inter_token_s(self) -> float:
        """The mean seconds per token after the first."""
        return (self.total_s - self.first_s) / max(1, self.tokens - 1)


async def ask(engine: AsyncEngine, prompt: list[int], params: SamplingParams) -> Answer:
    """Read one request to its end."""
    begin, first_s, tokens = time.perf_counter(), 0.0, 0
    async for output in engine.generate(prompt_token_ids=prompt, params=params):
        assert output.error is None, output.error
        tokens += len(output.new_token_ids)
        if tokens and not first_s:
            first_s = time.perf_counter() - begin
    return Answer(first_s, time.perf_counter() - begin, tokens)


async def run_load(engine: AsyncEngine, lengths: MeanLengths, streams: int, requests: int) -> list[Answer]:
    """Send all requests, `streams` at a time."""
    rng, room = random.Random(0), asyncio.Semaphore(streams)

    async def one(index: int, prompt: int, output: int) -> Answer:
        ids = common.draw_prompts(rng, 1, prompt, DRAWN_IDS)[0]
        params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True, seed=index)
        async with room:
            return await ask(engine, ids, params)

    drawn = lengths.draw(requests, seed=0)
    return list(await asyncio.gather(*(one(index, *each) for index, each in enumerate(drawn))))


def check(engine: Engine) -> None:
    """Raise AssertionError unless requests that run together have the tokens of each alone."""
    prompts = common.draw_prompts(random.Random(0), CHECKED, 40, DRAWN_IDS)
    params = [
        SamplingParams(max_tokens=CHECKED_TOKENS, temperature=index % 2 * 0.8, ignore_eos=True, seed=index)
        for index in range(CHECKED)
    ]
    together = [one.new_token_ids for one in engine.generate(prompts, params)]
    pairs = zip(prompts, params, strict=True)
    alone = [engine.generate([prompt], one)[0].new_token_ids for prompt, one in pairs]
    assert together == alone, "tokens depend on the batch"


def measure(
    stepped: AsyncEngine, timeline: Timeline, lengths: MeanLengths, streams: int, requests: int
) -> dict[str, Any]:
    """Return the row of one load, without what names its case."""
    timeline.begin()
    begin = time.perf_counter()
    answers = asyncio.run(run_load(stepped, lengths, streams, requests))
    seconds = time.perf_counter() - begin
    tokens = sum(answer.tokens for answer in answers)
    return {
        "streams": streams,
        "requests": requests,
        "mean_prompt": lengths.prompt,
        "mean_output": lengths.output,
        "seconds": round(seconds, 3),
        "output_tokens": tokens,
        "tokens_per_s": round(tokens / seconds, 1),
        "ttft_ms": percentiles([1e3 * answer.first_s for answer in answers]),
        "tpot_ms": percentiles([1e3 * answer.inter_token_s for answer in answers if answer.tokens > 1]),
        "parts": timeline.parts(seconds),
    }


def loads(text: str) -> list[MeanLengths]:
    """Parse a flag's mean lengths, PROMPT:OUTPUT, separated by commas."""
    return [mean_lengths(part) for part in text.split(",")]


def add_flags(parser: argparse.ArgumentParser) -> None:
    common.add_engine_flags(parser, may_be_auto=True)
    parser.add_argument("--streams", type=common.numbers, default=[64], help="clients, separated by commas")
    parser.add_argument("--lengths", type=loads, default=[MeanLengths(200, 200)], metavar="PROMPT:OUTPUT,...")
    parser.add_argument(
        "--requests",
        type=common.numbers,
        help="of each load: one number, or one for each of --streams; default: four of each client",
    )
    parser.add_argument(
        "--fixed-depths", type=common.numbers, default=[], help="with --mtp-step auto, separated by commas"
    )
    parser.add_argument("--max-batch", type=count, help="default: the most streams")
    parser.add_argument("--accept", type=float, default=2.6, help="mean new tokens per round at mtp_step 3")
    parser.add_argument("--beside", type=Path, metavar="FILE", help="saved rows to print next to ours")


def cases_of(flags: argparse.Namespace) -> list[tuple[MeanLengths, int, int, int | None]]:
    """Return lengths, streams, requests and fixed depth of each load, None for mtp_step's own depth.

    Raises ValueError for flags that contradict each other.
    """
    requests = flags.requests or [4 * streams for streams in flags.streams]
    if len(requests) == 1:
        requests = requests * len(flags.streams)
    if len(requests) != len(flags.streams):
        raise ValueError(
            f"requests must have one number, or one for each of streams, got {requests} for {flags.streams}; "
            "name as many of each"
        )
    if flags.fixed_depths and flags.mtp_step != "auto":
        raise ValueError(
            f"fixed_depths must come with mtp_step auto, got {flags.mtp_step}; pass --mtp-step auto"
        )
    pairs = list(zip(flags.streams, requests, strict=True))
    own = [(lengths, *pair, None) for lengths in flags.lengths for pair in pairs]
    return [*own, *((flags.lengths[0], *pair, depth) for pair in pairs for depth in flags.fixed_depths)]


def run(flags: argparse.Namespace) -> dict[str, Any]:
    """Check the tokens, then print a row of each load."""
    cases = cases_of(flags)
    saved = [] if flags.beside is None else read_rows(flags.beside, SAVED_FIELDS, {})
    begin = time.perf_counter()
    engine = common.open_engine(
        flags,
        kind=FixableEngine,
        max_batch=flags.max_batch or max(flags.streams),
        max_model_len=max(lengths.longest for lengths in flags.lengths) + 64,
        # No prompt comes twice.
        prefix_cache=False,
        lookup="off",
        synthetic_acceptance=rate_for(flags.accept, 3),
    )
    start_s = time.perf_counter() - begin
    step = engine.runner.step
    step.accept_at(None)
    check(engine)
    step.accept_at(rate_for(flags.accept, 3))
    case = {
        "engine": f"compiled-mtp {__version__}",
        "device": common.device_name(engine),
        "shape": flags.shape or flags.model.name,
        "weights": "fp8" if flags.fp8 else "bf16",
    }
    timeline, rows = Timeline(engine), list[dict[str, Any]]()
    settle_interpreter()
    # The clients' coroutines and the stepping thread share one interpreter.
    stepped = AsyncEngine(engine, max_open=max(requests for _, _, requests, _ in cases))
    for lengths, streams, requests, depth in cases:
        engine.fixed_depth = depth
        own = case | {"mtp_step": flags.mtp_step if depth is None else depth}
        found, line = with_beside(own | measure(stepped, timeline, lengths, streams, requests), saved)
        if line:
            print(f"beside: {line}")
        print(json.dumps(found), flush=True)
        rows.append(found)
    stepped.close()
    return {"start_s": round(start_s, 1), "max_batch": flags.max_batch or max(flags.streams), "rows": rows}
