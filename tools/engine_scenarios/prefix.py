"""How much time the prefix cache saves for a repeated prompt, and how much it costs a new one.

    python tools/bench_engine.py prefix --prompt-tokens 4000 --repeats 3
    python tools/bench_engine.py prefix --shape 27b --prompt-tokens 8192 --turn-tokens 512

One engine decodes the same random prompts with and without the cache, in turns: each prompt is new, then
repeated, then continued by a turn of new tokens. Without the cache a prompt has no keys, which is the only
difference of an engine without the prefix cache. Tokens and rounds must be the same with and without a hit,
for the prompt and for its continuation. The line has the medians of the times to the first token, how many
times sooner it comes for a repeated prompt, and for new prompts the median ratio of the time with the cache
to the time without, for the first token and for the tokens after it. A shape runs uncompiled unless --compile
is given: products take most of a prompt's time.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

from compiled_mtp import Engine, RequestOutput, SamplingParams
from engine_scenarios import common


class Timed(NamedTuple):
    """A request's tokens and rounds, and seconds: to its first token and from there to its end."""

    token_ids: list[int]
    rounds: list[int]
    cached_tokens: int
    first_s: float
    rest_s: float


# By way of decoding a prompt: whether the cache is used, and whether the prompt is continued.
WAYS = {
    "new": (True, False),
    "without_cache": (False, False),
    "again": (True, False),
    "goes_on": (True, True),
    "goes_on_without_cache": (False, True),
}
FOUND = ("again", "goes_on")


def add_flags(parser: argparse.ArgumentParser) -> None:
    common.add_engine_flags(parser)
    common.add_clock_flag(parser)
    parser.add_argument("--prompt-tokens", type=int, default=4000)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--turn-tokens", type=int, default=64, help="new tokens that continue a prompt")
    parser.add_argument("--prefill-chunk", type=int, help="default: the engine's")
    parser.add_argument("--repeats", type=int, default=3, help="prompts")


def decode(engine: Engine, prompt: list[int], params: SamplingParams, now: Callable[[], float]) -> Timed:
    """Decode one request alone."""
    outputs: list[RequestOutput] = []
    begin = now()
    engine.add_request(prompt_token_ids=prompt, params=params)
    while not outputs:
        outputs += engine.step()
    first = now()
    while engine.has_unfinished_requests():
        outputs += engine.step()
    metrics = outputs[-1].metrics
    token_ids = [token_id for output in outputs for token_id in output.new_token_ids]
    return Timed(token_ids, metrics.rounds_by_accepted, metrics.cached_tokens, first - begin, now() - first)


def time_prompts(
    engine: Engine,
    prompts: list[list[int]],
    turns: list[list[int]],
    params: SamplingParams,
    now: Callable[[], float],
) -> dict[str, list[Timed]]:
    """Return the times of every prompt in each of WAYS.

    Raises AssertionError if the cache changes tokens or rounds, has a hit where it must not, or misses one.
    """
    found: dict[str, list[Timed]] = {name: [] for name in WAYS}
    new, *later = WAYS
    for index, (prompt, turn) in enumerate(zip(prompts, turns, strict=True)):
        for name in (*common.in_turn((new, later[0]), index), *later[1:]):
            has_cache, goes_on = WAYS[name]
            # A request without keys finds nothing in the cache and leaves nothing there.
            prefix = engine.scheduler.prefix
            with mock.patch.object(prefix, "_keys_of", prefix._keys_of if has_cache else lambda *_: []):
                found[name].append(decode(engine, prompt + turn * goes_on, params, now))
        last = {name: (timed[-1].token_ids, timed[-1].rounds) for name, timed in found.items()}
        is_same = last["new"] == last["without_cache"] == last["again"]
        is_same = is_same and last["goes_on"] == last["goes_on_without_cache"]
        assert is_same, f"tokens or rounds depend on the cache at prompt {index}"
    for name, timed in found.items():
        if name in FOUND:
            is_right = all(one.cached_tokens for one in timed)
            assert is_right, "a prompt that came again was not found in the cache; raise --prompt-tokens"
        else:
            is_right = not any(one.cached_tokens for one in timed)
            assert is_right, "a prompt that was new, or without the cache, was found in it"
    return found


def run(flags: argparse.Namespace) -> dict[str, Any]:
    """Check and time all prompts."""
    if flags.shape and flags.compile == "auto":
        flags.graph_mode = "uncompiled"
    length, turn = flags.prompt_tokens, flags.turn_tokens
    longest = length + turn + flags.max_tokens
    engine = common.open_engine(
        flags,
        kind=Engine,
        prefill_chunk=flags.prefill_chunk,
        max_model_len=longest,
        max_batch=1,
        num_blocks=(2 + flags.repeats) * -(-longest // 64) + 1,
    )
    chunk = engine.runner.spec.prefill_chunk
    params = SamplingParams(max_tokens=flags.max_tokens, temperature=0.8, seed=1, ignore_eos=True)
    rng, vocab_size = random.Random(0), engine.model_config.vocab_size
    prompts = common.draw_prompts(rng, flags.repeats, length, vocab_size)
    turns = common.draw_prompts(rng, flags.repeats, turn, vocab_size)
    for warm in (min(length, 2 * chunk + 1), turn):
        engine.generate(common.draw_prompts(rng, 1, warm, vocab_size), params)
    found = time_prompts(engine, prompts, turns, params, common.clock(flags))
    first_s = {name: statistics.median(one.first_s for one in timed) for name, timed in found.items()}
    pairs = list(zip(found["new"], found["without_cache"], strict=True))
    return {
        "shape": flags.shape,
        "prompt_tokens": length,
        "cached_tokens": found["again"][0].cached_tokens,
        "turn_tokens": turn,
        "goes_on_cached_tokens": found["goes_on"][0].cached_tokens,
        "first_token_s": {name: round(seconds, 4) for name, seconds in first_s.items()},
        "cpu_time": flags.cpu_time,
        "times_sooner": round(first_s["without_cache"] / first_s["again"], 2),
        "cost_first_token": round(statistics.median(a.first_s / b.first_s for a, b in pairs), 4),
        "cost_decode": round(statistics.median(a.rest_s / b.rest_s for a, b in pairs), 4),
        "snapshot_mib": round(engine.runner.memory.snapshot_bytes / 2**20, 2),
        "mtp_step": flags.mtp_step,
        "prefill_chunk": chunk,
        "device": str(engine.runner.spec.device),
        "repeats": flags.repeats,
    }
