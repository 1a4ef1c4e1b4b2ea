"""The engine in a trainer's loop: sample, train, replace the weights, score the samples with the new ones.

python examples/train.py
python examples/train.py --model Qwen/Qwen3.5-35B-A3B --routed-experts

`train` stands in for a trainer: it moves the norms a little, at random.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

import torch
from safetensors.torch import load_file

from compiled_mtp import Engine, EngineConfig, RequestOutput, SamplingParams

PROMPTS = ["def add(a, b):", "import ", "class Stack:"]


def read_weights(engine: Engine) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors by name, where a trainer has its own."""
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(engine.config.model.glob("*.safetensors")):
        weights |= load_file(file)
    return weights


def train(weights: dict[str, torch.Tensor], samples: Sequence[RequestOutput]) -> None:
    for name, weight in weights.items():
        if name.endswith("norm.weight"):
            weights[name] = weight + 0.05 * torch.randn_like(weight)


def processed(output: RequestOutput) -> list[float]:
    """Log probabilities of the tokens in the distributions from which they were drawn."""
    return [entry.processed.logprob for entry in output.logprobs or () if entry.processed is not None]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=EngineConfig().model, help="default: the checkpoint that ships")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--routed-experts", action="store_true", help="for a mixture of experts")
    flags = parser.parse_args(argv)
    torch.manual_seed(0)
    params = SamplingParams(
        max_tokens=flags.max_tokens,
        temperature=0.9,
        logprobs=0,
        logprobs_mode="both",
        return_routed_experts=flags.routed_experts,
    )
    with Engine(flags.model, scoring=True, routed_experts=flags.routed_experts, seed=0) as engine:
        weights = read_weights(engine)
        for step in range(flags.steps):
            samples = engine.generate(PROMPTS, params)
            tokens = [sample.new_token_ids for sample in samples]
            # Scores of the weights that sampled are the samples' own numbers, to the bit.
            assert [one.logprobs for one in engine.score(PROMPTS, tokens, params)] == [
                sample.logprobs for sample in samples
            ]
            if samples[0].routed_experts is not None:
                print("experts of tokens, by layer:", [one.routed_experts.shape for one in samples])
            train(weights, samples)
            manifest = {name: (weight.shape, weight.dtype) for name, weight in weights.items()}
            engine.update_weights((manifest, weights.items()))
            for sample, scored in zip(samples, engine.score(PROMPTS, tokens, params), strict=True):
                old, new = processed(sample), processed(scored)
                ratio = math.exp(sum(new) - sum(old))
                print(f"step {step}, {len(old)} tokens: p(new weights) / p(old weights) = {ratio:.3g}")


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:  # A mistake of the caller's, in one line.
        raise SystemExit(f"error: {error}") from None
