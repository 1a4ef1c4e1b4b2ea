"""Throughput where blocks are short, beside a pool that holds everything.

    python tools/bench_pressure.py                                        # the checkpoint that ships
    python tools/bench_pressure.py --shape 4b --max-tokens 32768 --accept 2.6 --graph-mode uncompiled

Many requests that ask for far more tokens than they use run on three pools: one that holds the worst case of
all, one that holds a quarter of it, and one that holds half of what they really use. Each request ends by an
abort when it has --new-tokens, which no engine foresees: like a stop token it is known once a result has been
read, when the next round has been launched. More than that are neither compared nor counted.

On every pool the requests run first with what drafts are worth, which with random weights is next to nothing.
Unless all of them get all of their tokens, and the same on every pool, nothing is printed. --accept adds runs
on which the drafts of that many tokens a round (at mtp_step 3) are kept: their tokens follow what was
drafted, so that they are counted and not compared. Every pool has an engine of its own; on a GPU --graph-mode
uncompiled starts it in seconds.

Ends in one JSON line. For each pool: tokens a second (of the last of --repeats runs: the first takes host
memory), the share of the full pool's, both also without the steps that launch prompts; how often requests
left for host memory (offloads) or to be computed again (withdrawals); host memory that the run was the first
to need; tokens a time that one left, of all and of the request that left most often.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from bench_step import fill_random, model_config, rate_for
from op_cases import SHAPES

from compiled_mtp.config import EngineConfig
from compiled_mtp.engine import Engine
from compiled_mtp.frontend.checkpoint import make_front, open_front
from compiled_mtp.plan import StepPlan, StepResult
from compiled_mtp.request import SamplingParams
from compiled_mtp.scheduler.phases import RequestPhase

_AWAY = (RequestPhase.OFFLOADED, RequestPhase.WAITING)


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


def main(arguments: list[str] | None = None) -> None:
    """Run the three pools and print."""
    options = _parse(arguments)
    block_size = EngineConfig().block_size
    full = _blocks(options, options.prompt_tokens + options.max_tokens, block_size)
    used = _blocks(options, options.prompt_tokens + options.new_tokens, block_size)
    pools = {"full": full, "quarter": full // 4, "half_of_used": used // 2}
    runs, device = {}, ""
    for name, blocks in pools.items():
        runs[name], device = _measure(options, blocks + 1)
        gc.collect()  # An engine's memory is the next one's.
    for name, (checked, _) in runs.items():
        if checked.streams != runs["full"][0].streams:
            raise SystemExit(f"error: tokens on the pool {name} differ from those on the full one")
    lines = {name: _line(options, pools[name], runs[name], runs["full"]) for name in pools}
    fixed = ("shape", "requests", "prompt_tokens", "max_tokens", "new_tokens", "mtp_step", "accept")
    sizes = {name: getattr(options, name) for name in (*fixed, "offload_gb", "graph_mode", "cpu_time")}
    print(json.dumps({"device": device} | sizes | lines))


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=EngineConfig().model)
    parser.add_argument("--shape", choices=SHAPES, help="a released shape with random weights, on a GPU")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--graph-mode", default="auto", help="on a GPU: replay, reduce-overhead, uncompiled")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=3968, help="what each asks for")
    parser.add_argument("--new-tokens", type=int, default=300, help="what each uses")
    parser.add_argument("--mtp-step", type=int, default=3)
    parser.add_argument("--accept", type=float, help="synthetic: mean new tokens a round at mtp_step 3")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each kind on each pool")
    parser.add_argument("--offload-gb", type=float, default=None)
    parser.add_argument(
        "--cpu-time", action="store_true", help="count the process's time, on a CPU that others use too"
    )
    options = parser.parse_args(arguments)
    if options.new_tokens < 1:
        parser.error(f"--new-tokens must be at least 1, got {options.new_tokens}; of none there is no speed")
    return options


def _blocks(options: argparse.Namespace, tokens: int, block_size: int) -> int:
    return int(options.requests) * -(-tokens // block_size)


def _line(
    options: argparse.Namespace, num_blocks: int, runs: tuple[Run, Run], full: tuple[Run, Run]
) -> dict[str, Any]:
    """What to print of a pool: the run that is timed is the last one."""
    (_, run), (_, best) = runs, full
    num_tokens = options.requests * options.new_tokens
    decode_s, best_decode_s = run.seconds - run.prompt_s, best.seconds - best.prompt_s
    line = {
        "num_blocks": num_blocks,
        "tokens_per_s": round(num_tokens / run.seconds, 1),
        "of_full": round(best.seconds / run.seconds, 3),
        "tokens_per_s_without_prompts": round(num_tokens / decode_s, 1),
        "of_full_without_prompts": round(best_decode_s / decode_s, 3),
        "steps": run.steps,
        "most_running": run.most_running,
        "offloads": run.offloads,
        "withdrawals": run.withdrawals,
        "host_mib_taken": run.host_bytes >> 20,
        "tokens_a_move": None,
        "least_tokens_a_move": None,
    }
    if run.left:
        most = max(run.left.values())
        line["tokens_a_move"] = round(num_tokens / run.left.total(), 1)
        line["least_tokens_a_move"] = round(options.new_tokens / most, 1)
    return line


def _measure(options: argparse.Namespace, num_blocks: int) -> tuple[tuple[Run, Run], str]:
    """Run all requests on a pool: the last run whose tokens count, the last run that is timed; the device."""
    engine = _make_engine(options, num_blocks)
    step = engine.runner.step
    engine.generate([[1, 2, 3]], SamplingParams(max_tokens=8, ignore_eos=True))
    if options.accept is not None:
        step.accept_at(None)
    checked = timed = [_run(engine, options, seed) for seed in range(options.repeats)][-1]
    if options.accept is not None:
        # The rate of one draft is a property of the model: the same at every depth.
        step.accept_at(rate_for(options.accept, 3))
        timed = [_run(engine, options, options.repeats + seed) for seed in range(options.repeats)][-1]
    device = engine.runner.device
    engine.close()
    return (checked, timed), torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _make_engine(options: argparse.Namespace, num_blocks: int) -> Engine:
    """An engine of so many blocks; all have the same weights."""
    given: dict[str, Any] = {
        "model": options.model,
        "device": options.device,
        "max_batch": options.requests,
        "max_model_len": options.prompt_tokens + options.max_tokens,
        "num_blocks": num_blocks,
        "mtp_step": options.mtp_step,
        "offload_gb": options.offload_gb,
        "synthetic_acceptance": None if options.accept is None else 0.0,
    }
    is_plain = options.graph_mode == "uncompiled"
    given |= {"compile": "off"} if is_plain else {"graph_mode": options.graph_mode}
    given |= {"dtype": "bfloat16"} if options.shape is not None and options.device != "cpu" else {}
    config, fill = EngineConfig(**given), None
    if options.shape is None:
        front = open_front(config)
    else:
        front, fill = make_front(config, options.model, model_config(options.shape), None), _fill
    return Engine(config, front=front, fill=fill)


def _fill(parameters: Mapping[str, torch.Tensor]) -> None:
    """The same random numbers in every engine."""
    torch.manual_seed(0)
    fill_random(parameters)


def _run(engine: Engine, options: argparse.Namespace, seed: int) -> Run:
    """Run the requests, with prompts that follow from `seed`, to their ends."""
    clock = time.process_time if options.cpu_time else time.perf_counter
    rng, vocab_size = random.Random(seed), engine.model_config.vocab_size
    run = Run({str(index): [] for index in range(options.requests)})
    for name in run.streams:
        prompt = [rng.randrange(vocab_size) for _ in range(options.prompt_tokens)]
        params = SamplingParams(max_tokens=options.max_tokens, ignore_eos=True, seed=int(name))
        engine.add_request(prompt_token_ids=prompt, params=params, request_id=name)
    kinds, launch = [""], engine.runner.run

    def note_kind(plan: StepPlan | None) -> StepResult | None:
        kinds[0] = "" if plan is None else plan.kind
        return launch(plan)

    engine.runner.run = note_kind  # type: ignore[method-assign]
    host_bytes = engine.runner.moves.host_bytes
    before, places = engine.stats(), dict.fromkeys(run.streams, RequestPhase.WAITING)
    begin = last = clock()
    while engine.has_unfinished_requests():
        _take(engine, options, run)
        _note_places(engine, run, places)
        now = clock()
        run.prompt_s += (now - last) * (kinds[0] in ("prefill", "first"))
        run.steps += 1
        last = now
    run.seconds, after = last - begin, engine.stats()
    engine.runner.run = launch  # type: ignore[method-assign]
    run.offloads = after.offloads - before.offloads
    run.withdrawals = after.withdrawals - before.withdrawals
    run.host_bytes = engine.runner.moves.host_bytes - host_bytes
    return run


def _take(engine: Engine, options: argparse.Namespace, run: Run) -> None:
    """A step; whoever has all its tokens ends. Leaves the program if a request fails or ends before."""
    for output in engine.step():
        stream = run.streams[output.request_id]
        stream += output.new_token_ids[: options.new_tokens - len(stream)]
        if len(stream) < options.new_tokens and output.finish_reason is not None:
            why = output.error or output.finish_reason
            raise SystemExit(f"error: request {output.request_id} ended after {len(stream)} tokens: {why}")
        if len(stream) == options.new_tokens and output.finish_reason is None:
            engine.abort(output.request_id)


def _note_places(engine: Engine, run: Run, places: dict[str, RequestPhase]) -> None:
    """Count who has left since the step before, and who has a place."""
    scheduler, num_running = engine.scheduler, 0
    for name, before in places.items():
        if scheduler.is_live(name):
            places[name] = now = scheduler.phase(name)
            if now in _AWAY and before not in _AWAY:
                run.left[name] += 1
            num_running += now not in _AWAY
    run.most_running = max(run.most_running, num_running)


if __name__ == "__main__":
    main()
