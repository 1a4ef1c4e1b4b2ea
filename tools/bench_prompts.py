"""Time to the first token of prompts that arrive together, sharing launches against one launch each.

    python tools/bench_prompts.py --prompts 16 --prompt-tokens 20
    python tools/bench_prompts.py --shape 27b --prompts 32 --prompt-tokens 20 --max-batch 32

One engine takes the same random prompts both ways, in turns; it ends with an error if a first token differs.
The last line is JSON: medians over the repeats of the time to the first token, its mean over the prompts and
that of the last of them, how many launches prefilled them, and how much sooner the mean comes where launches
are shared. A shape has random weights, and by default runs uncompiled.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench_step import fill_random, model_config
from op_cases import SHAPES

from compiled_mtp import Engine, EngineConfig, SamplingParams
from compiled_mtp.frontend.checkpoint import make_front
from compiled_mtp.plan import StepPlan


class Timed(NamedTuple):
    """First tokens, the seconds to each, and the launches that prefilled."""

    token_ids: list[int]
    first_s: list[float]
    num_launches: int


def make_engine(options: argparse.Namespace) -> Engine:
    """Without a prefix cache: a prompt that comes again is prefilled again."""
    given: dict[str, Any] = {
        "model": options.model,
        "device": options.device,
        "mtp_step": options.mtp_step,
        "prefill_chunk": options.prefill_chunk,
        "max_model_len": options.prompt_tokens + 64,
        "max_batch": options.max_batch,
        "num_threads": options.num_threads,
        "prefix_cache": False,
    }
    if options.shape is None:
        return Engine(EngineConfig(**given, compile=options.compile or "auto"))
    given |= {"dtype": "bfloat16", "compile": options.compile or "off"}
    config, model = EngineConfig(**given), model_config(options.shape)
    return Engine(config, front=make_front(config, options.model, model, None), fill=fill_random)


def run(engine: Engine, prompts: Sequence[list[int]], most: int) -> Timed:
    """Prefill prompts that arrive together, of which at most so many share a launch."""
    engine.scheduler.share_launches(most)
    params = SamplingParams(max_tokens=1, seed=1)
    launched: list[StepPlan] = []
    schedule = engine.scheduler.schedule

    def counted() -> StepPlan | None:
        plan = schedule()
        if plan is not None and plan.kind == "prefill":
            launched.append(plan)
        return plan

    engine.scheduler.schedule = counted  # type: ignore[method-assign]
    token_ids, first_s = [0] * len(prompts), [0.0] * len(prompts)
    begin = time.perf_counter()
    for index, prompt in enumerate(prompts):
        engine.add_request(prompt_token_ids=prompt, params=params, request_id=str(index))
    while engine.has_unfinished_requests():
        for output in engine.step():
            index = int(output.request_id)
            token_ids[index], first_s[index] = output.new_token_ids[0], time.perf_counter() - begin
    engine.scheduler.schedule = schedule  # type: ignore[method-assign]
    return Timed(token_ids, first_s, len(launched))


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    options = _parse(arguments)
    engine = make_engine(options)
    rng, vocab_size = random.Random(0), engine.model_config.vocab_size
    sets = [
        [[rng.randrange(vocab_size) for _ in range(options.prompt_tokens)] for _ in range(options.prompts)]
        for _ in range(options.repeats + 1)
    ]
    ways = {"shared": engine.scheduler.limits.max_pieces, "one_each": 1}
    found: dict[str, list[Timed]] = {name: [] for name in ways}
    for turn, prompts in enumerate(sets):
        # Whoever comes first is not always the same.
        for name in sorted(ways, reverse=bool(turn % 2)):
            found[name].append(run(engine, prompts, ways[name]))
        if found["shared"][-1].token_ids != found["one_each"][-1].token_ids:
            raise SystemExit(f"error: first tokens depend on who shares a launch, at turn {turn}")
    line: dict[str, Any] = {
        "shape": options.shape,
        "prompts": options.prompts,
        "prompt_tokens": options.prompt_tokens,
        "most_in_a_launch": ways["shared"],
    }
    for name, timed in found.items():
        kept = timed[1:]  # The first warms up.
        line[name] = {
            "mean_first_token_s": round(statistics.median(statistics.mean(t.first_s) for t in kept), 4),
            "last_first_token_s": round(statistics.median(max(t.first_s) for t in kept), 4),
            "launches": kept[-1].num_launches,
        }
    ratio = line["one_each"]["mean_first_token_s"] / line["shared"]["mean_first_token_s"]
    line |= {"times_sooner": round(ratio, 2), "device": str(engine.runner.device)}
    print(json.dumps(line | {"mtp_step": options.mtp_step, "repeats": options.repeats}))


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=EngineConfig().model)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=20)
    parser.add_argument("--max-batch", type=int, default=16)
    parser.add_argument("--mtp-step", type=int, default=3)
    parser.add_argument("--shape", choices=SHAPES, help="a released shape with random weights, on a GPU")
    parser.add_argument("--compile", choices=("off", "on"), default=None, help="default: off with --shape")
    parser.add_argument("--prefill-chunk", type=int, help="default: the engine's")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--num-threads", type=int)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
