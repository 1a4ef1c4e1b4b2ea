"""Measure what FP8 weights and FP8 activations cost a checkpoint in loss and greedy agreement.

    compiled-mtp quantize compiled_mtp/default_model --output /tmp/fp8
    python tools/compare_recipes.py compiled_mtp/default_model /tmp/fp8

Compares the bfloat16 checkpoint with its FP8 version under W8A16 and W8A8, on --text or on text that the
default model was not trained on. The reference are --tokens greedy tokens of the bfloat16 checkpoint, 100 per
prompt. Per engine: `loss`, the mean loss of the next token in nats; `agreement`, the share of the reference
tokens that the engine ranks first, given the tokens before; `until_difference`, the mean number of tokens of
its own continuation of a prompt before the first that differs. The last line is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from default_model_training import data

from compiled_mtp import Engine, EngineConfig, SamplingParams
from compiled_mtp.errors import check
from compiled_mtp.terminal.console import run_command
from compiled_mtp.terminal.flags import Parser

CONTINUATION, PREFIX = 100, 256


def start(model: Path, recipe: str, arguments: argparse.Namespace) -> Engine:
    config = EngineConfig(
        model=model,
        device=arguments.device,
        mtp_step=0,
        compile="off",
        prefix_cache=False,
        weight_recipe=recipe,
        max_model_len=max(arguments.window, PREFIX + CONTINUATION) + 1,
        max_batch=4,
    )
    return Engine(config)


def read_windows(engine: Engine, paths: Sequence[Path], length: int) -> list[list[int]]:
    """Return the first `length` tokens of each text that has that many."""
    texts = [path.read_text() for path in paths] or data.read_split(data.default_stdlib())[1]
    assert engine.tokenizer is not None
    windows = (engine.tokenizer.encode(text)[:length] for text in texts)
    return [window for window in windows if len(window) == length]


def continue_greedily(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    params = SamplingParams(max_tokens=CONTINUATION, temperature=0.0, ignore_eos=True)
    return [output.new_token_ids for output in engine.generate(prompts, params)]


def score(engine: Engine, prompts: list[list[int]]) -> list[list[tuple[float, int]]]:
    """Return (log probability, rank) of every token of each prompt except its first token."""
    params = SamplingParams(max_tokens=1, ignore_eos=True, prompt_logprobs=0)
    outputs = engine.generate(prompts, params)
    return [[(entry.logprob, entry.rank) for entry in output.prompt_logprobs or ()] for output in outputs]


def main() -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="directory of the bfloat16 checkpoint")
    parser.add_argument("quantized", type=Path, help="directory of the same checkpoint in FP8")
    parser.add_argument("--text", type=Path, nargs="*", default=[], help="text files")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--window", type=int, default=1024, help="tokens per window of text")
    parser.add_argument("--windows", type=int, default=40, help="most windows to compute the loss over")
    parser.add_argument("--tokens", type=int, default=1000, help="greedy tokens to compare")
    arguments = parser.parse_args()
    for name, least in (("tokens", CONTINUATION), ("windows", 1)):
        got = getattr(arguments, name)
        check(got >= least, f"--{name}", f"be at least {least}", got, "raise it")
    plain = start(arguments.checkpoint, "auto", arguments)
    windows = read_windows(plain, arguments.text, arguments.window)
    needed = arguments.tokens // CONTINUATION
    prompts = [window[:PREFIX] for window in windows[:needed]]
    check(len(prompts) == needed, "text", f"give {needed} windows", len(prompts), "give more")
    windows = windows[: arguments.windows]
    wanted = continue_greedily(plain, prompts)
    whole = [[*prompt, *tokens] for prompt, tokens in zip(prompts, wanted, strict=True)]
    result: dict[str, Any] = {}
    engines = [("bf16", plain)]
    engines += [(recipe, start(arguments.quantized, recipe, arguments)) for recipe in ("w8a16", "w8a8")]
    for name, engine in engines:
        logprobs = [logprob for scored in score(engine, windows) for logprob, _ in scored]
        ranks = [rank for scored in score(engine, whole) for _, rank in scored[-CONTINUATION:]]
        own = continue_greedily(engine, prompts)
        same = [[a == b for a, b in zip(*pair, strict=True)] for pair in zip(own, wanted, strict=True)]
        result[name] = {
            "loss": -sum(logprobs) / len(logprobs),
            "agreement": sum(rank == 1 for rank in ranks) / len(ranks),
            "until_difference": sum([*one, False].index(False) for one in same) / len(same),
        }
        print(f"{name}: {result[name]}", file=sys.stderr)
    result |= {"windows": len(windows), "window": arguments.window, "tokens": len(prompts) * CONTINUATION}
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(lambda interrupts: main()))
