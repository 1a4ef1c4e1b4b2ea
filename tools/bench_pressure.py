"""Throughput where blocks are short, beside a pool that holds everything: one JSON line.

Many requests that ask for far more tokens than they use run on three pools: one that holds the worst case of
all, one that holds a quarter of it, and one that holds half of what they really use. It refuses to print if a
token differs between them.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from compiled_mtp.config import EngineConfig
from compiled_mtp.engine import Engine
from compiled_mtp.request import SamplingParams


def main(arguments: list[str] | None = None) -> None:
    """Run the three pools and print."""
    options = _parse(arguments)
    config = EngineConfig()
    full = _blocks(options, options.prompt_tokens + options.max_tokens, config.block_size)
    used = _blocks(options, options.prompt_tokens + options.new_tokens, config.block_size)
    pools = {"full": full, "quarter": full // 4, "half_of_used": used // 2}
    lines, streams = {}, {}
    for name, blocks in pools.items():
        lines[name], streams[name] = _measure(options, blocks + 1)
    for name, stream in streams.items():
        if stream != streams["full"]:
            raise SystemExit(f"error: tokens on the pool {name} differ from those on the full one")
    rate = lines["full"]["tokens_per_s"]
    for line in lines.values():
        line["of_full"] = round(line["tokens_per_s"] / rate, 3)
    sizes = {"requests": options.requests, "prompt_tokens": options.prompt_tokens}
    sizes |= {"max_tokens": options.max_tokens, "new_tokens": options.new_tokens}
    print(json.dumps(sizes | {"mtp_step": options.mtp_step, "offload_gb": options.offload_gb} | lines))


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=EngineConfig().model)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=3968, help="what each asks for")
    parser.add_argument("--new-tokens", type=int, default=300, help="what each uses")
    parser.add_argument("--mtp-step", type=int, default=3)
    parser.add_argument("--offload-gb", type=float, default=None)
    return parser.parse_args(arguments)


def _blocks(options: argparse.Namespace, tokens: int, block_size: int) -> int:
    return int(options.requests) * -(-tokens // block_size)


def _measure(options: argparse.Namespace, num_blocks: int) -> tuple[dict[str, Any], list[list[int]]]:
    """Run all requests on a pool; what to print of it, and their tokens."""
    engine = Engine(
        EngineConfig(
            model=options.model,
            device=options.device,
            max_batch=options.requests,
            num_blocks=num_blocks,
            mtp_step=options.mtp_step,
            offload_gb=options.offload_gb,
        )
    )
    # Requests end long before their max_tokens: by an abort, as a client's stop would.
    rng, tokens = random.Random(1), {str(i): list[int]() for i in range(options.requests)}
    vocab_size = engine.model_config.vocab_size
    engine.generate([[1, 2, 3]], SamplingParams(max_tokens=8, ignore_eos=True))
    for name in tokens:
        prompt = [rng.randrange(vocab_size) for _ in range(options.prompt_tokens)]
        params = SamplingParams(max_tokens=options.max_tokens, ignore_eos=True, seed=int(name))
        engine.add_request(prompt_token_ids=prompt, params=params, request_id=name)
    begin, ended, steps = time.perf_counter(), set[str](), 0
    while engine.has_unfinished_requests():
        steps += 1
        for output in engine.step():
            tokens[output.request_id] += output.new_token_ids
            if len(tokens[output.request_id]) >= options.new_tokens and output.finish_reason is None:
                ended.add(output.request_id)
        for name in ended:
            engine.abort(name)
        ended.clear()
    seconds, stats = time.perf_counter() - begin, engine.stats()
    engine.close()
    streams = [stream[: options.new_tokens] for stream in tokens.values()]
    moves = stats.offloads + stats.withdrawals
    line = {
        "num_blocks": num_blocks - 1,
        "tokens_per_s": round(sum(map(len, streams)) / seconds, 1),
        "steps": steps,
        "offloads": stats.offloads,
        "withdrawals": stats.withdrawals,
        "tokens_a_move": round(sum(map(len, streams)) / moves, 1) if moves else None,
    }
    return line, streams


if __name__ == "__main__":
    main()
