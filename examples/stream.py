"""One request, printed as it is written, and what became of its drafts.

python examples/stream.py
python examples/stream.py --model Qwen/Qwen3.5-4B --prompt "Write a haiku about rivers."
"""

from __future__ import annotations

import argparse

from compiled_mtp import Engine, EngineConfig, SamplingParams


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=EngineConfig().model, help="default: the checkpoint that ships")
    parser.add_argument("--prompt", default="def quicksort(items):")
    parser.add_argument("--max-tokens", type=int, default=64)
    flags = parser.parse_args(argv)
    params = SamplingParams(max_tokens=flags.max_tokens, temperature=0.0, include_drafts=True)
    drafted = kept = 0
    with Engine(flags.model) as engine:
        for output in engine.stream(flags.prompt, params):
            print(output.new_text, end="", flush=True)
            for one in output.drafts or ():
                drafted += len(one.token_ids)
                kept += one.num_accepted
    print(f"\n{kept} of {drafted} drafts kept; finish_reason {output.finish_reason}")


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:  # A mistake of the caller's, in one line.
        raise SystemExit(f"error: {error}") from None
