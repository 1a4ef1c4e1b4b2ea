"""Throughput where blocks are short, beside a pool that holds everything.

    python tools/bench_engine.py pressure                                 # the checkpoint that ships
    python tools/bench_engine.py pressure --shape 4b --max-tokens 32768 --accept 2.6 --graph-mode uncompiled

Many requests that ask for far more tokens than they use run on three pools: one that holds the worst case of
all, one that holds a quarter of it, and one that holds half of what they really use. Each request ends by an
abort when it has --new-tokens, which no engine foresees: like a stop token it is known once a result has been
read, when the next round has been launched. More than that are neither compared nor counted.

On every pool the requests run first with what drafts are worth, which with random weights is next to nothing.
Unless all of them get all of their tokens, and the same on every pool, nothing is printed. --accept adds runs
on which the drafts of that many tokens a round (at mtp_step 3) are kept: their tokens follow what was
drafted, so that they are counted and not compared. Every pool has an engine of its own.

For each pool the line has tokens a second (of the last of --repeats runs: the first takes host memory), the
share of the full pool's, both also without the steps that launch prompts; how often requests left for host
memory (offloads) or to be computed again (withdrawals); host memory that the run was the first to need;
tokens a time that one left, of all and of the request that left most often.
"""

from __future__ import annotations

import argparse
import gc
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from bench_step import rate_for

from compiled_mtp.config import EngineConfig
from compiled_mtp.engine import Engine
from compiled_mtp.plan import StepPlan, StepResult
from compiled_mtp.request import SamplingParams
from compiled_mtp.scheduler.phases import RequestPhase
from engine_scenarios import common

AWAY = (RequestPhase.OFFLOADED, RequestPhase.WAITING)


@dataclass
class Run:
    """The requests' tokens, and what it took: seconds in all, and in the steps that launched prompts."""

    streams: dict[str, list[int]]
    seconds: float = 0.0
    prompt_s: float = 0.0
    steps: int = 0
    most_running: int = 0
    offloads: int = 0
    withdrawals: int = 0
    host_bytes: int = 0
    left: Counter[str] = field(default_factory=Counter)


def add_flags(parser: argparse.ArgumentParser) -> None:
    common.add_engine_flags(parser)
    common.add_clock_flag(parser)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=3968, help="what each asks for")
    parser.add_argument("--new-tokens", type=common.count, default=300, help="what each uses")
    parser.add_argument("--accept", type=float, help="synthetic: mean new tokens a round at mtp_step 3")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each kind on each pool")
    parser.add_argument("--offload-gb", type=float)


def run(flags: argparse.Namespace) -> dict[str, Any]:
    """Run the three pools."""

    def blocks(new_tokens: int) -> int:
        return int(flags.requests * -(-(flags.prompt_tokens + new_tokens) // EngineConfig().block_size))

    full, used = blocks(flags.max_tokens), blocks(flags.new_tokens)
    pools = {"full": full, "quarter": full // 4, "half_of_used": used // 2}
    runs, device = {}, ""
    for name, num_blocks in pools.items():
        *runs[name], device = measure(flags, num_blocks + 1)
        gc.collect()  # An engine's memory is the next one's.
    checked, timed = ({name: found[index] for name, found in runs.items()} for index in (0, 1))
    for name, found in checked.items():
        is_same = found.streams == checked["full"].streams
        assert is_same, f"tokens on the pool {name} differ from those on the full one"
    lines = {name: make_line(flags, pools[name], one, timed["full"]) for name, one in timed.items()}
    fixed = ("shape", "requests", "prompt_tokens", "max_tokens", "new_tokens", "mtp_step", "accept")
    sizes = {name: getattr(flags, name) for name in (*fixed, "offload_gb", "graph_mode", "cpu_time")}
    return {"device": device} | sizes | lines


def make_line(flags: argparse.Namespace, num_blocks: int, one: Run, best: Run) -> dict[str, Any]:
    """What to print of a pool."""
    num_tokens = flags.requests * flags.new_tokens
    decode_s, best_decode_s = one.seconds - one.prompt_s, best.seconds - best.prompt_s
    return {
        "num_blocks": num_blocks,
        "tokens_per_s": round(num_tokens / one.seconds, 1),
        "of_full": round(best.seconds / one.seconds, 3),
        "tokens_per_s_without_prompts": round(num_tokens / decode_s, 1),
        "of_full_without_prompts": round(best_decode_s / decode_s, 3),
        "steps": one.steps,
        "most_running": one.most_running,
        "offloads": one.offloads,
        "withdrawals": one.withdrawals,
        "host_mib_taken": one.host_bytes >> 20,
        "tokens_a_move": round(num_tokens / one.left.total(), 1) if one.left else None,
        "least_tokens_a_move": round(flags.new_tokens / max(one.left.values()), 1) if one.left else None,
    }


def measure(flags: argparse.Namespace, num_blocks: int) -> tuple[Run, Run, str]:
    """Run all requests on a pool: the last run whose tokens count, the last run that is timed; the device."""
    engine = common.open_engine(
        flags,
        kind=Engine,
        max_batch=flags.requests,
        max_model_len=flags.prompt_tokens + flags.max_tokens,
        num_blocks=num_blocks,
        offload_gb=flags.offload_gb,
        synthetic_acceptance=None if flags.accept is None else 0.0,
    )
    step = engine.runner.step
    engine.generate([[1, 2, 3]], SamplingParams(max_tokens=8, ignore_eos=True))
    if flags.accept is not None:
        step.accept_at(None)
    checked = timed = [decode(engine, flags, seed) for seed in range(flags.repeats)][-1]
    if flags.accept is not None:
        # The rate of one draft is a property of the model: the same at every depth.
        step.accept_at(rate_for(flags.accept, 3))
        timed = [decode(engine, flags, flags.repeats + seed) for seed in range(flags.repeats)][-1]
    engine.close()
    return checked, timed, common.device_name(engine)


def decode(engine: Engine, flags: argparse.Namespace, seed: int) -> Run:
    """Run the requests, with prompts that follow from `seed`, to their ends."""
    clock: Callable[[], float] = common.clock(flags)
    vocab_size = engine.model_config.vocab_size
    prompts = common.draw_prompts(random.Random(seed), flags.requests, flags.prompt_tokens, vocab_size)
    one = Run({str(index): [] for index in range(flags.requests)})
    for name, prompt in zip(one.streams, prompts, strict=True):
        params = SamplingParams(max_tokens=flags.max_tokens, ignore_eos=True, seed=int(name))
        engine.add_request(prompt_token_ids=prompt, params=params, request_id=name)
    kind, launch = "", engine.runner.run

    def note_kind(plan: StepPlan | None) -> StepResult | None:
        nonlocal kind
        kind = "" if plan is None else plan.kind
        return launch(plan)

    host_bytes = engine.runner.moves.host_bytes
    before, phases = engine.stats(), dict.fromkeys(one.streams, RequestPhase.WAITING)
    begin = last = clock()
    with mock.patch.object(engine.runner, "run", note_kind):
        while engine.has_unfinished_requests():
            take(engine, flags.new_tokens, one)
            note_phases(engine, one, phases)
            now = clock()
            one.prompt_s += (now - last) * (kind in ("prefill", "first"))
            one.steps += 1
            last = now
    one.seconds, after = last - begin, engine.stats()
    one.offloads = after.offloads - before.offloads
    one.withdrawals = after.withdrawals - before.withdrawals
    one.host_bytes = engine.runner.moves.host_bytes - host_bytes
    return one


def take(engine: Engine, new_tokens: int, one: Run) -> None:
    """A step; a request that has all its tokens ends. Raises AssertionError if one fails or ends before."""
    for output in engine.step():
        stream = one.streams[output.request_id]
        stream += output.new_token_ids[: new_tokens - len(stream)]
        if output.finish_reason is None:
            if len(stream) == new_tokens:
                engine.abort(output.request_id)
            continue
        why = output.error or output.finish_reason
        name = output.request_id
        assert len(stream) == new_tokens, f"request {name} ended after {len(stream)} tokens: {why}"


def note_phases(engine: Engine, one: Run, phases: dict[str, RequestPhase]) -> None:
    """Count the requests that have left since the step before, and those that run."""
    scheduler, num_running = engine.scheduler, 0
    for name, before in phases.items():
        if scheduler.is_live(name):
            phases[name] = now = scheduler.phase(name)
            if now in AWAY and before not in AWAY:
                one.left[name] += 1
            num_running += now not in AWAY
    one.most_running = max(one.most_running, num_running)
