"""What the prefix cache gives to a prompt that comes again, and what it costs one that does not.

    python tools/bench_prefix.py --prompt-tokens 4000 --repeats 3
    python tools/bench_prefix.py --shape 27b --prompt-tokens 8192 --turn-tokens 512

One engine takes the same random prompts with the cache and without, in turns: each prompt is new to both,
then comes again, then goes on by a turn of new tokens. Without the cache a prompt has no keys, which is all
that an engine without checkpoints does otherwise. Tokens and rounds of the first must be the same with
and without a hit, and so must those of the turn, or nothing is printed. Ends in one JSON line: times to the
first token (medians), how much sooner it comes for a prompt that comes again, and the median over prompts of
the time with the cache to that without where nothing is found: of the wall clock, of what the processor was
busy with (a CPU's other tenants do not count), for the first token and for the rest. A shape has random
weights, and by default runs uncompiled: a prompt's time is that of its products.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench_step import fill_random, model_config
from op_cases import SHAPES

from compiled_mtp import Engine, EngineConfig, RequestOutput, SamplingParams
from compiled_mtp.frontend.checkpoint import make_front


class Timed(NamedTuple):
    """A request's tokens and rounds, and seconds: to its first token and from there to its end."""

    token_ids: list[int]
    rounds: list[int]
    cached_tokens: int
    first_s: float
    first_busy_s: float
    rest_busy_s: float


def run_without(engine: Engine, prompt: list[int], params: SamplingParams) -> Timed:
    """`run`, of a request that finds nothing in the cache and leaves nothing there."""
    with mock.patch.object(engine.scheduler.prefix, "_keys_of", return_value=[]):
        return run(engine, prompt, params)


def run(engine: Engine, prompt: list[int], params: SamplingParams) -> Timed:
    """Decode one request, alone."""
    outputs: list[RequestOutput] = []
    begin, begin_busy = time.perf_counter(), time.process_time()
    engine.add_request(prompt_token_ids=prompt, params=params)
    while not outputs:
        outputs += engine.step()
    first, first_busy = time.perf_counter(), time.process_time()
    while engine.has_unfinished_requests():
        outputs += engine.step()
    end_busy = time.process_time()
    metrics = outputs[-1].metrics
    token_ids = [token_id for output in outputs for token_id in output.new_token_ids]
    times = (first - begin, first_busy - begin_busy, end_busy - first_busy)
    return Timed(token_ids, metrics.rounds_by_accepted, metrics.cached_tokens, *times)


def make_engine(arguments: argparse.Namespace) -> Engine:
    longest = arguments.prompt_tokens + arguments.turn_tokens + arguments.max_tokens
    given: dict[str, Any] = {
        "model": arguments.model,
        "device": arguments.device,
        "mtp_step": arguments.mtp_step,
        "prefill_chunk": arguments.prefill_chunk,
        "max_model_len": longest,
        "max_batch": 1,
        "num_threads": arguments.num_threads,
        "num_blocks": (2 + arguments.repeats) * -(-longest // 64) + 1,
    }
    if arguments.shape is None:
        return Engine(EngineConfig(**given, compile=arguments.compile or "auto"))
    given |= {"dtype": "bfloat16", "compile": arguments.compile or "off"}
    config, model = EngineConfig(**given), model_config(arguments.shape)

    return Engine(config, front=make_front(config, arguments.model, model, None), fill=fill_random)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=EngineConfig().model)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prompt-tokens", type=int, default=4000)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--mtp-step", type=int, default=3)
    parser.add_argument("--shape", choices=SHAPES, help="a released shape with random weights, on a GPU")
    parser.add_argument("--compile", choices=("off", "on"), default=None, help="default: off with --shape")
    parser.add_argument("--turn-tokens", type=int, default=64, help="new tokens of the prompt that goes on")
    parser.add_argument("--prefill-chunk", type=int, help="default: the engine's")
    parser.add_argument("--repeats", type=int, default=3, help="prompts")
    parser.add_argument("--num-threads", type=int)
    parser.add_argument(
        "--cpu-time", action="store_true", help="count the process's time, on a CPU that others use too"
    )
    arguments = parser.parse_args()
    length, most, turn = arguments.prompt_tokens, arguments.max_tokens, arguments.turn_tokens
    engine = make_engine(arguments)
    chunk = engine.config.resolve_prefill_chunk(engine.runner.device.type, engine.model_config)
    params = SamplingParams(max_tokens=most, temperature=0.8, seed=1, ignore_eos=True)
    rng, vocab_size = random.Random(0), engine.model_config.vocab_size
    prompts = [[rng.randrange(vocab_size) for _ in range(length)] for _ in range(arguments.repeats)]
    turns = [[rng.randrange(vocab_size) for _ in range(turn)] for _ in prompts]
    for warm in (min(length, 2 * chunk + 1), turn):
        engine.generate([[rng.randrange(vocab_size) for _ in range(warm)]], params)
    new: list[Timed] = []
    without: list[Timed] = []
    again: list[Timed] = []
    longer: list[Timed] = []
    longer_without: list[Timed] = []
    for index, prompt in enumerate(prompts):
        # Whoever comes first is not always the same.
        order = ((run, new), (run_without, without))
        for timed_run, found in order if index % 2 else order[::-1]:
            found.append(timed_run(engine, prompt, params))
        again.append(run(engine, prompt, params))
        longer.append(run(engine, prompt + turns[index], params))
        longer_without.append(run_without(engine, prompt + turns[index], params))
        pairs = ((new, without), (again, without), (longer, longer_without))
        for one, other in [(ours[-1], plain[-1]) for ours, plain in pairs]:
            if (one.token_ids, one.rounds) != (other.token_ids, other.rounds):
                raise SystemExit(f"error: tokens or rounds depend on the cache at prompt {index}")
    plain = [*new, *without, *longer_without]
    if any(one.cached_tokens for one in plain):
        raise SystemExit("error: a prompt that was new, or without the cache, was found in it")
    if not all(one.cached_tokens for one in [*again, *longer]):
        raise SystemExit("error: a prompt that came again was not found in the cache; raise --prompt-tokens")

    def median(found: list[Timed], name: str) -> float:
        return statistics.median(getattr(one, name) for one in found)

    def cost(name: str) -> float:
        pairs = zip(new, without, strict=True)
        return round(statistics.median(getattr(a, name) / getattr(b, name) for a, b in pairs), 4)

    first_s = {
        "new": new,
        "without_cache": without,
        "again": again,
        "goes_on": longer,
        "goes_on_without_cache": longer_without,
    }
    clock = "first_busy_s" if arguments.cpu_time else "first_s"
    line = {
        "shape": arguments.shape,
        "prompt_tokens": length,
        "cached_tokens": again[0].cached_tokens,
        "turn_tokens": turn,
        "goes_on_cached_tokens": longer[0].cached_tokens,
        "first_token_s": {name: round(median(found, clock), 4) for name, found in first_s.items()},
        "cpu_time": arguments.cpu_time,
        "times_sooner": round(median(without, "first_s") / median(again, "first_s"), 2),
        "times_sooner_busy": round(median(without, "first_busy_s") / median(again, "first_busy_s"), 2),
        "cost_first_token": cost("first_s"),
        "cost_first_token_busy": cost("first_busy_s"),
        "cost_decode_busy": cost("rest_busy_s"),
        "checkpoint_mib": round(engine.runner.memory.checkpoint_bytes / 2**20, 2),
        "mtp_step": arguments.mtp_step,
        "prefill_chunk": chunk,
        "device": str(engine.runner.device),
        "repeats": arguments.repeats,
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
