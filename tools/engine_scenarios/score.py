"""How fast `Engine.score` is: tokens per second, beside prefill of the same tokens and decoding.

    python tools/bench_engine.py score --shape 4b --device cuda --mtp-step 7 --batch 1,8
    python tools/bench_engine.py score --shape tiny --device cpu --batch 1,2 --tokens 24 --repeats 1

Decodes a continuation for each of the prompts, then scores it and compares all log probabilities to the bit.
"prefill" reads prompt and continuation as one prompt and returns its prompt_logprobs: other bits, and the
speed that scores without the promise of equal bits could have.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

from compiled_mtp.engine import Engine
from compiled_mtp.request import SamplingParams
from compiled_mtp.terminal.flags import count
from engine_scenarios import common


def add_flags(parser: argparse.ArgumentParser) -> None:
    common.add_engine_flags(parser)
    parser.set_defaults(mtp_step=7)
    parser.add_argument("--batch", type=common.numbers, default=[1, 8], help="requests, separated by commas")
    parser.add_argument("--context", type=count, default=256, help="prompt tokens")
    parser.add_argument("--tokens", type=count, default=256, help="tokens of a continuation")
    parser.add_argument("--repeats", type=count, default=3, help="timed calls of each kind")


def run(flags: argparse.Namespace) -> dict[str, Any]:
    """Check and time every batch."""
    engine = common.open_engine(
        flags,
        kind=Engine,
        max_batch=max(flags.batch),
        max_model_len=flags.context + flags.tokens + 64,
        prefix_cache=False,
        scoring=True,
    )
    vocab_size = engine.model_config.vocab_size
    prompts = common.draw_prompts(random.Random(0), max(flags.batch), flags.context, vocab_size)
    rows = [measure(engine, prompts[:batch], flags) for batch in sorted(flags.batch)]
    line = {
        "shape": flags.shape or flags.model.name,
        "device": common.device_name(engine),
        "mtp_step": flags.mtp_step,
        "context": flags.context,
        "tokens": flags.tokens,
        "rows": rows,
    }
    engine.close()
    return line


def measure(engine: Engine, prompts: list[list[int]], flags: argparse.Namespace) -> dict[str, Any]:
    """Return the row of a batch. Raises AssertionError for a score that is not decoding's."""
    fields = {"max_tokens": flags.tokens, "temperature": 1.0, "seed": 0, "ignore_eos": True}
    params = SamplingParams(**fields, logprobs=0, logprobs_mode="both")
    decoded = engine.generate(prompts, params)
    continuations = [output.new_token_ids for output in decoded]
    # A row of prefill scores the token after it, so the prompts of this call hold all tokens.
    whole = [[*p, *c] for p, c in zip(prompts, continuations, strict=True)]
    of_prompt = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    ways = {
        "score": lambda: engine.score(prompts, continuations, params),
        "prefill": lambda: engine.generate(whole, of_prompt),
        "decode": lambda: engine.generate(prompts, params),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(flags.repeats + 1):
        for name in common.in_turn(list(ways), turn):
            begin = time.perf_counter()
            outputs = ways[name]()
            times[name].append(time.perf_counter() - begin)
            if name == "score":
                for output, one in zip(outputs, decoded, strict=True):
                    assert output.logprobs == one.logprobs, "a score differs from decoding's log probability"
    num_tokens = len(prompts) * flags.tokens
    rates = {name: num_tokens / statistics.median(seconds[1:]) for name, seconds in times.items()}
    return {"batch": len(prompts)} | {f"{name}_tokens_per_s": round(rate, 1) for name, rate in rates.items()}
