"""Time to the first token of prompts that arrive together, sharing launches against one launch each.

    python tools/bench_engine.py prompts --prompts 16 --prompt-tokens 20
    python tools/bench_engine.py prompts --shape 27b --prompts 32 --prompt-tokens 20 --max-batch 32

One engine takes the same random prompts both ways, in turns; it ends with an error if a first token differs.
The line has medians over the repeats of the time to the first token, its mean over the prompts and that of
the last of them, how many launches prefilled them, and how much sooner the mean comes where launches are
shared. A shape runs uncompiled unless --compile says otherwise.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from compiled_mtp import Engine, SamplingParams
from compiled_mtp.plan import StepPlan
from engine_scenarios import common


class Timed(NamedTuple):
    """First tokens, the seconds to each, and the launches that prefilled."""

    token_ids: list[int]
    first_s: list[float]
    num_launches: int


def add_flags(parser: argparse.ArgumentParser) -> None:
    common.add_engine_flags(parser)
    parser.add_argument("--prompts", type=common.count, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=20)
    parser.add_argument("--max-batch", type=int, default=16)
    parser.add_argument("--prefill-chunk", type=int, help="default: the engine's")
    parser.add_argument("--repeats", type=int, default=3)


def prefill(engine: Engine, prompts: Sequence[list[int]], most: int) -> Timed:
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


def run(flags: argparse.Namespace) -> dict[str, Any]:
    """Check and time both ways."""
    if flags.shape and flags.compile == "auto":
        flags.graph_mode = "uncompiled"
    engine = common.open_engine(
        flags,
        kind=Engine,
        max_batch=flags.max_batch,
        max_model_len=flags.prompt_tokens + 64,
        prefill_chunk=flags.prefill_chunk,
        # A prompt that comes again is prefilled again.
        prefix_cache=False,
    )
    rng, vocab_size = random.Random(0), engine.model_config.vocab_size
    ways = {"one_each": 1, "shared": engine.scheduler.limits.max_pieces}
    found: dict[str, list[Timed]] = {name: [] for name in ways}
    for turn in range(flags.repeats + 1):
        prompts = common.draw_prompts(rng, flags.prompts, flags.prompt_tokens, vocab_size)
        for name in common.in_turn(list(ways), turn):
            found[name].append(prefill(engine, prompts, ways[name]))
        is_same = found["shared"][-1].token_ids == found["one_each"][-1].token_ids
        assert is_same, f"first tokens depend on what shares a launch, at turn {turn}"
    line: dict[str, Any] = {
        "shape": flags.shape,
        "prompts": flags.prompts,
        "prompt_tokens": flags.prompt_tokens,
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
    line |= {"times_sooner": round(ratio, 2), "device": str(engine.runner.spec.device)}
    return line | {"mtp_step": flags.mtp_step, "repeats": flags.repeats}
