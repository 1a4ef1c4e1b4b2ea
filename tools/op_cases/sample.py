"""Cases of `sample`: greedy, temperature only, and filtered rows at the model's vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from compiled_mtp.ops.sample import SamplingTables, sample
from op_cases import ModelShape, OpCase

SETTINGS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "T=1": {"temperature": 1.0},
    "T=0.7 top-k 20 top-p 0.8": {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    "T=1 top-p 0.95": {"temperature": 1.0, "top_p": 0.95},
    "T=1 min-p 0.05": {"temperature": 1.0, "min_p": 0.05},
}


def make_inputs(
    device: str, seed: int, vocab: int, rows: int, parameters: dict[str, float]
) -> tuple[Any, ...]:
    """Logits as a language model gives them: a flat bulk and a peaked head of a few hundred ids."""
    generator = torch.Generator(device).manual_seed(seed)
    logits = torch.randn(rows, vocab, device=device, generator=generator) * 2
    head = torch.randint(0, vocab, (rows, 300), device=device, generator=generator)
    logits.scatter_add_(1, head, 16 - torch.arange(1, 301, device=device).expand(rows, 300).float().log() * 2)

    def table(name: str, dtype: torch.dtype, neutral: float = 0.0) -> torch.Tensor:
        return torch.full((rows + 1,), parameters.get(name, neutral), dtype=dtype, device=device)

    tables = SamplingTables(
        temperature=table("temperature", torch.float32),
        top_k=table("top_k", torch.int32),
        top_p=table("top_p", torch.float32, 1.0),
        min_p=table("min_p", torch.float32),
        repetition_penalty=table("repetition_penalty", torch.float32, 1.0),
        presence_penalty=table("presence_penalty", torch.float32),
        frequency_penalty=table("frequency_penalty", torch.float32),
        seed=torch.arange(rows + 1, device=device),
        output_counts=torch.zeros(0, vocab, dtype=torch.int32, device=device),
        prompt_seen=torch.zeros(0, vocab, dtype=torch.bool, device=device),
        bias=torch.zeros(0, vocab, device=device),
        min_position=table("min_position", torch.int64),
        stop_ids=torch.zeros(0, 1, dtype=torch.int64, device=device),
    )
    tokens = torch.zeros(rows, dtype=torch.int64, device=device)
    positions = torch.arange(rows, device=device) + 1000 * seed
    state_index = torch.arange(1, rows + 1, dtype=torch.int32, device=device)
    return logits, tokens, positions, state_index, tables, vocab - 243


def check(args: tuple[Any, ...]) -> None:
    token, logprob, _ = sample(*args)
    logits, tokens, positions, state_index, tables, num_valid_ids = args
    on_cpu = SamplingTables(*(table.cpu() for table in tables))
    rows = (logits.cpu(), tokens.cpu(), positions.cpu(), state_index.cpu())
    wanted, wanted_logprob, _ = sample(*rows, on_cpu, num_valid_ids)
    # A noise that differs in its last bit decides between two ids whose scores are as good as equal.
    different = int((token.cpu() != wanted).sum())
    assert different <= len(token) // 1000, f"{different} of {len(token)} tokens differ from the reference"
    same = token.cpu() == wanted
    torch.testing.assert_close(logprob.cpu()[same], wanted_logprob[same], rtol=0, atol=4e-6)


def torch_multinomial(logits: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs = torch.log_softmax(logits, -1)
    token = torch.multinomial(torch.softmax(logits, -1), 1)
    return token, logprobs.gather(1, token)


def torch_greedy(logits: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    token = logits.argmax(-1, keepdim=True)
    return token, torch.log_softmax(logits, -1).gather(1, token)


def torch_sort(logits: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Top-k 20 and top-p 0.8 by a full sort, as most samplers do it."""
    values, ids = (logits / 0.7).sort(-1, descending=True)
    values = values.where(torch.arange(values.shape[1], device=values.device) < 20, -torch.inf)
    probabilities = torch.softmax(values, -1)
    kept = probabilities.cumsum(-1) - probabilities < 0.8
    token = ids.gather(1, torch.multinomial(probabilities * kept, 1))
    return token, torch.log_softmax(logits, -1).gather(1, token)


ALTERNATIVES = {"greedy": torch_greedy, "T=1": torch_multinomial, "T=0.7 top-k 20 top-p 0.8": torch_sort}


def cases(shape: ModelShape, rows: int, settings: Mapping[str, int]) -> list[OpCase]:
    """One case for each kind of request; bytes count the logits once."""
    result = []
    for label, parameters in SETTINGS.items():

        def inputs(device: str, seed: int, parameters: dict[str, float] = parameters) -> tuple[Any, ...]:
            return make_inputs(device, seed, shape.vocab, rows, parameters)

        other = ALTERNATIVES.get(label)
        name = other.__name__.replace("_", " ") if other else "none"
        result.append(OpCase(label, inputs, sample, 4 * rows * shape.vocab, check, other, name))
    return result
