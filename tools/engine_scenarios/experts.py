"""What recorded experts cost: engines with and without `routed_experts`, on the same requests.

    python tools/bench_engine.py experts --shape 35b-a3b --graph-mode uncompiled --batch 1,8,32
    python tools/bench_engine.py experts --shape tiny-moe --device cpu --batch 1,2 --tokens 12 --repeats 1

Three engines follow one another: without the setting, with it, and without it again, whose difference from
the first is the noise. With the setting every request asks for its experts. All engines must give the same
tokens, and the record one entry for each token but the last. A row has milliseconds per round: the median
of the times between steps in which every request decodes. "read_ms" is the median time for which the end of a
request that asks waits.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from compiled_mtp.engine import Engine
from compiled_mtp.request import RequestOutput, SamplingParams
from compiled_mtp.terminal.flags import count
from engine_scenarios import common

ORDER = ("off", "on", "off_again")


class Timed(NamedTuple):
    """The tokens of each request, seconds of each round of all requests, and of each reading of experts."""

    tokens: list[list[int]]
    round_s: list[float]
    read_s: list[float]


def add_flags(parser: argparse.ArgumentParser) -> None:
    common.add_engine_flags(parser)
    parser.set_defaults(shape="35b-a3b")
    parser.add_argument(
        "--batch", type=common.numbers, default=[1, 8, 32], help="requests, separated by commas"
    )
    parser.add_argument("--context", type=count, default=256, help="prompt tokens")
    parser.add_argument("--tokens", type=count, default=192, help="output tokens of a request")
    parser.add_argument("--repeats", type=count, default=3, help="timed decodes of each batch")


def run(flags: argparse.Namespace) -> dict[str, Any]:
    """Check and time every batch in each of the engines."""
    found: dict[str, dict[int, Timed]] = {}
    device = ""
    for way in ORDER:
        engine = common.open_engine(
            flags,
            kind=Engine,
            max_batch=max(flags.batch),
            max_model_len=flags.context + flags.tokens + 64,
            prefix_cache=False,
            routed_experts=way == ORDER[1],
        )
        assert engine.model_config.is_moe, f"the shape must have experts, got {flags.shape or flags.model}"
        found[way] = {
            batch: measure(engine, batch, flags, is_on=way == "on") for batch in sorted(flags.batch)
        }
        device = common.device_name(engine)
        engine.close()
        del engine
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return {
        "shape": flags.shape or flags.model.name,
        "device": device,
        "mtp_step": flags.mtp_step,
        "context": flags.context,
        "tokens": flags.tokens,
        "rows": [row(found, batch) for batch in sorted(flags.batch)],
    }


def row(found: dict[str, dict[int, Timed]], batch: int) -> dict[str, Any]:
    """Return the row of a batch. Raises AssertionError for tokens that depend on the setting."""
    for way in ORDER:
        assert found[way][batch].tokens == found["off"][batch].tokens, "recorded experts change tokens"
    ms = {way: 1e3 * statistics.median(found[way][batch].round_s) for way in ORDER}
    return {
        "batch": batch,
        **{f"{way}_ms": round(value, 4) for way, value in ms.items()},
        "on_over_off": round(ms["on"] / min(ms["off"], ms["off_again"]), 4),
        "off_over_off": round(max(ms["off"], ms["off_again"]) / min(ms["off"], ms["off_again"]), 4),
        "read_ms": round(1e3 * statistics.median(found["on"][batch].read_s), 4),
    }


def measure(engine: Engine, batch: int, flags: argparse.Namespace, *, is_on: bool) -> Timed:
    """Decode `batch` requests several times; the first time only warms up."""
    prompts = common.draw_prompts(random.Random(0), batch, flags.context, engine.model_config.vocab_size)
    params = SamplingParams(
        max_tokens=flags.tokens, temperature=0.8, seed=1, ignore_eos=True, return_routed_experts=is_on
    )
    tokens, round_s, read_s = list[list[int]](), list[float](), list[float]()
    for repeat in range(flags.repeats + 1):
        outputs, times, reads = decode(engine, prompts, params)
        if repeat:
            assert tokens == outputs, "tokens differ between two decodes"
            round_s += times
            read_s += reads
        tokens = outputs
    return Timed(tokens, round_s, read_s or [0.0])


def decode(
    engine: Engine, prompts: Sequence[list[int]], params: SamplingParams
) -> tuple[list[list[int]], list[float], list[float]]:
    """Return the tokens of each request, and seconds: of each round of all requests, of each reading."""
    ids = [engine.add_request(prompt_token_ids=prompt, params=params) for prompt in prompts]
    parts: dict[str, list[RequestOutput]] = {name: [] for name in ids}
    times, reads = list[float](), list[float]()
    read = engine.scheduler._results.read_experts

    def timed_read(*given: Any) -> Any:
        begin = time.perf_counter()
        assert read is not None
        experts = read(*given)
        reads.append(time.perf_counter() - begin)
        return experts

    engine.scheduler._results.read_experts = timed_read if params.return_routed_experts else read
    last = time.perf_counter()
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter()
        is_whole = len(outputs) == len(prompts) and all(one.finish_reason is None for one in outputs)
        if is_whole and all(parts.values()):
            times.append(now - last)
        last = now
        for output in outputs:
            parts[output.request_id].append(output)
    engine.scheduler._results.read_experts = read
    tokens = [[token for one in parts[name] for token in one.new_token_ids] for name in ids]
    if params.return_routed_experts:
        for prompt, new, name in zip(prompts, tokens, ids, strict=True):
            experts = parts[name][-1].routed_experts
            assert experts is not None, "a request's experts are missing"
            assert experts.shape[0] == len(prompt) + len(new) - 1, "experts of some tokens are missing"
    return tokens, times, reads
