"""Many requests at once, each with parameters of its own: choices, a grammar, log probabilities.

pip install '.[guided]'
python examples/batch.py
"""

from __future__ import annotations

import argparse

from compiled_mtp import Engine, EngineConfig, SamplingParams


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=EngineConfig().model, help="default: the checkpoint that ships")
    flags = parser.parse_args(argv)
    prompts = ["def add(a, b):", "import ", "version = "]
    params = [
        SamplingParams(max_tokens=16, temperature=0.8, seed=7, n=2),
        SamplingParams(max_tokens=8, temperature=0.0, logprobs=2),
        SamplingParams(max_tokens=12, guided_regex=r'"[0-9]\.[0-9]\.[0-9]"'),
    ]
    with Engine(EngineConfig(model=flags.model, max_batch=4)) as engine:
        for output in engine.generate(prompts, params):
            print(f"{output.request_id}.{output.index} ({output.finish_reason}): {output.new_text!r}")
            for entry in output.logprobs or ():
                print(f"  token {entry.token_id}, rank {entry.rank}: {entry.logprob:.2f}")
        stats = engine.stats().speculation
        print(f"{stats.mean_new_tokens:.2f} tokens per round")


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:  # A mistake of the caller's, in one line.
        raise SystemExit(f"error: {error}") from None
