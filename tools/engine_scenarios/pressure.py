"""Throughput with too few KV blocks, compared with a pool that holds everything.

    python tools/bench_engine.py pressure                                 # the checkpoint that ships
    python tools/bench_engine.py pressure --shape 4b --max-tokens 32768 --graph-mode uncompiled

Many requests that ask for far more tokens than they use run on three pools, each with its own engine: one
holds the worst case of all, one a quarter of it, and one half of the tokens that they really use. The tool
aborts each request when it has --new-tokens tokens. The engine cannot foresee this: as with a stop token, it
learns of the end when it reads a result, after it has launched the next round. Further tokens are neither
compared nor counted.

Unless all requests get all of their tokens, and the same on every pool, the tool prints nothing. The line has
for each pool the tokens per second of the last of --repeats runs (the first allocates host memory), their
ratio to the full pool's, and how often requests were preempted to host memory (offloads) or to be recomputed
(recomputes).
"""

from __future__ import annotations

import argparse
import gc
import random
from typing import Any

from compiled_mtp.config import EngineConfig
from compiled_mtp.engine import Engine
from compiled_mtp.request import SamplingParams
from compiled_mtp.terminal.flags import count
from engine_scenarios import common


def add_flags(parser: argparse.ArgumentParser) -> None:
    common.add_engine_flags(parser)
    common.add_clock_flag(parser)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=3968, help="tokens that each request asks for")
    parser.add_argument("--new-tokens", type=count, default=300, help="tokens that each request uses")
    parser.add_argument("--repeats", type=count, default=1, help="runs on each pool")
    parser.add_argument("--offload-gb", type=float)


def run(flags: argparse.Namespace) -> dict[str, Any]:
    """Run the three pools."""

    def blocks(new_tokens: int) -> int:
        return int(flags.requests * -(-(flags.prompt_tokens + new_tokens) // EngineConfig().block_size))

    full, used = blocks(flags.max_tokens), blocks(flags.new_tokens)
    streams, lines = dict[str, list[list[int]]](), dict[str, dict[str, Any]]()
    for name, num_blocks in {"full": full, "quarter": full // 4, "half_of_used": used // 2}.items():
        engine = common.open_engine(
            flags,
            kind=Engine,
            max_batch=flags.requests,
            max_model_len=flags.prompt_tokens + flags.max_tokens,
            num_blocks=num_blocks + 1,
            offload_gb=flags.offload_gb,
        )
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=8, ignore_eos=True))
        for seed in range(flags.repeats):
            streams[name], lines[name] = decode(engine, flags, seed)
        is_same = streams[name] == streams["full"]
        assert is_same, f"tokens on the pool {name} differ from those on the full one"
        of_full = round(lines[name]["tokens_per_s"] / lines["full"]["tokens_per_s"], 3)
        lines[name] |= {"num_blocks": num_blocks, "of_full": of_full}
        device = common.device_name(engine)
        engine.close()
        del engine
        # Free this engine's memory for the next one.
        gc.collect()
    sizes = ("shape", "requests", "prompt_tokens", "max_tokens", "new_tokens", "mtp_step", "offload_gb")
    return {"device": device} | {name: getattr(flags, name) for name in (*sizes, "cpu_time")} | lines


def decode(engine: Engine, flags: argparse.Namespace, seed: int) -> tuple[list[list[int]], dict[str, Any]]:
    """Run the requests, with prompts drawn from `seed`, to their ends; return their tokens and the figures.

    Raises AssertionError if a request fails or ends too early.
    """
    now, rng = common.clock(flags), random.Random(seed)
    prompts = common.draw_prompts(rng, flags.requests, flags.prompt_tokens, engine.model_config.vocab_size)
    streams: dict[str, list[int]] = {str(index): [] for index in range(flags.requests)}
    for name, prompt in zip(streams, prompts, strict=True):
        params = SamplingParams(max_tokens=flags.max_tokens, ignore_eos=True, seed=int(name))
        engine.add_request(prompt_token_ids=prompt, params=params, request_id=name)
    before, begin = engine.stats(), now()
    while engine.has_unfinished_requests():
        for output in engine.step():
            stream, name = streams[output.request_id], output.request_id
            stream += output.new_token_ids[: flags.new_tokens - len(stream)]
            why = output.error or output.finish_reason
            is_whole = len(stream) == flags.new_tokens
            assert why is None or is_whole, f"request {name} ended after {len(stream)} tokens: {why}"
            if why is None and is_whole:
                engine.abort(name)
    seconds, after = now() - begin, engine.stats()
    return list(streams.values()), {
        "tokens_per_s": round(flags.requests * flags.new_tokens / seconds, 1),
        "offloads": after.offloads - before.offloads,
        "recomputes": after.recomputes - before.recomputes,
    }
