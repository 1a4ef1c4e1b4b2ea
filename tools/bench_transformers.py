"""Decode the same prompts on the same CPU with this engine and with transformers' `generate`, in one run.

    python tools/bench_transformers.py --prompt-file examples/prompts.jsonl --max-tokens 128

Greedy, float32, one prompt at a time and the whole prompt in every turn, after a warm-up; the engine runs
uncompiled at mtp_step 0 and at --mtp-step. Tokens are checked first: each must be the argmax of transformers'
logits after the tokens before it, unless the two best logits are closer than 1e-3, since transformers
computes in another order. Then the three take turns prompt by prompt, so that other load on the machine slows
all of them. Prints one JSON line: tokens per second, and ratios to transformers on the same prompt in the
same turn; medians over prompts and --repeats turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from operator import truediv
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from compiled_mtp import Engine, EngineConfig, SamplingParams
from compiled_mtp.terminal.console import run_command
from compiled_mtp.terminal.flags import Parser

NEAR_TIE = 1e-3
Way = Callable[[list[int]], list[int]]


def check_same(model: Any, prompt: list[int], ours: list[int]) -> None:
    """Raise AssertionError if a token is not transformers' argmax, although the choice is clear."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + ours])).logits[0, len(prompt) - 1 : -1]
    best = logits.topk(2).values
    is_clear = best[:, 0] - best[:, 1] >= NEAR_TIE
    wrong = (logits.argmax(-1) != torch.tensor(ours)) & is_clear
    assert not wrong.any(), f"token {int(wrong.nonzero()[0])} differs from transformers"


def parse_flags(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-file", type=Path, required=True, help=".jsonl with one prompt per line")
    parser.add_argument("--model", type=Path, default=EngineConfig().model)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--mtp-step", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--clock",
        choices=("wall", "processor"),
        default="wall",
        help="processor: on a machine with other load",
    )
    parser.add_argument("--num-threads", type=int, default=torch.get_num_threads())
    return parser.parse_args(argv)


def open_engine(arguments: argparse.Namespace, mtp_step: int) -> Engine:
    """Return an uncompiled engine of one depth."""
    return Engine(
        EngineConfig(
            model=arguments.model,
            device="cpu",
            mtp_step=mtp_step,
            max_batch=1,
            # With the cache a prompt's second turn would skip its prefill, which transformers repeats.
            prefix_cache=False,
            num_threads=arguments.num_threads,
        )
    )


def make_ways(model: Any, engines: Mapping[int, Engine], max_tokens: int) -> dict[str, Way]:
    """Return the ways to decode a prompt to max_tokens tokens, by name; the second drafts nothing."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)

    def with_engine(step: int, prompt: list[int]) -> list[int]:
        return engines[step].generate([prompt], params)[0].new_token_ids

    def with_transformers(prompt: list[int]) -> list[int]:
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            do_sample=False,
            use_cache=True,
            pad_token_id=0,
        )
        made: list[int] = out[0, len(prompt) :].tolist()
        return made

    ours = {f"mtp_step {step}": partial(with_engine, step) for step in engines}
    return {"transformers": with_transformers, **ours}


def check_ways(ways: Mapping[str, Way], model: Any, prompt: list[int], max_tokens: int) -> None:
    """Raise AssertionError unless all ways give max_tokens tokens, and the same ones; also warms them up."""
    outputs = {name: way(prompt) for name, way in ways.items()}
    _, plain, *drafted = outputs.values()
    assert all(output == plain for output in drafted), "tokens depend on mtp_step"
    # Speeds count max_tokens tokens: no way may end earlier, for example because the context is full.
    made = {name: len(output) for name, output in outputs.items()}
    is_whole = set(made.values()) == {max_tokens}
    assert is_whole, f"every way must make --max-tokens tokens, got {made}; lower it"
    check_same(model, prompt, plain)


def main(argv: list[str] | None = None) -> int:
    """Check, time in turns, and print; return 0."""
    arguments = parse_flags(argv)
    torch.set_num_threads(arguments.num_threads)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    engines = {step: open_engine(arguments, step) for step in (0, arguments.mtp_step)}
    tokenizer = engines[0].tokenizer
    assert tokenizer is not None
    texts = [json.loads(line)["prompt"] for line in arguments.prompt_file.read_text().splitlines() if line]
    prompts = [tokenizer.encode(text) for text in texts]
    ways = make_ways(model, engines, arguments.max_tokens)
    for prompt in prompts:
        check_ways(ways, model, prompt, arguments.max_tokens)
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    now = time.perf_counter if arguments.clock == "wall" else time.process_time
    for prompt in prompts * arguments.repeats:
        for name, way in ways.items():
            begin = now()
            way(prompt)
            speeds[name].append(arguments.max_tokens / (now() - begin))

    def ratio(name: str, other: str) -> float:
        return round(statistics.median(map(truediv, speeds[name], speeds[other])), 2)

    medians = {name: round(statistics.median(values), 1) for name, values in speeds.items()}
    ratios = {name: ratio(name, "transformers") for name in ways}
    line = {
        "tokens_per_s": medians,
        "ratio_to_transformers": ratios,
        "ratio_to_mtp_step_0": ratio(f"mtp_step {arguments.mtp_step}", "mtp_step 0"),
        "mean_new_tokens": round(engines[arguments.mtp_step].stats().speculation.mean_new_tokens, 3),
        "num_threads": arguments.num_threads,
        "prompts": len(prompts),
        "max_tokens": arguments.max_tokens,
    }
    print(json.dumps(line))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(lambda interrupts: main()))
