"""Cases of `sample`: greedy, temperature only, and filtered rows at the model's vocabulary."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from compiled_mtp.ops.features import PENALTIES, RECENT_IDS
from compiled_mtp.ops.sample import SamplingTables, filter_logits, sample
from op_cases import INT32, ROWS, SHAPES, WINDOW, LaunchCase, ModelShape, OpCase, Source, launch, tensor

SETTINGS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "T=1": {"temperature": 1.0},
    "T=0.7 top-k 20 top-p 0.8": {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    "T=1 top-p 0.95": {"temperature": 1.0, "top_p": 0.95},
    "T=1 min-p 0.05": {"temperature": 1.0, "min_p": 0.05},
    "T=1 penalties": {"temperature": 1.0, "repetition_penalty": 1.05, "presence_penalty": 1.5},
}


def make_inputs(
    device: Any, seed: int | None, vocab: int, rows: int, parameters: dict[str, float], drafts: int = 0
) -> tuple[Any, ...]:
    """Return arguments with logits like a language model's: a flat bulk and a peak of a few hundred ids.

    The rows belong to rows / (1 + drafts) requests.
    """
    source = Source(device, seed)
    logits = source.normal(rows, vocab) * 2
    head = torch.randint(0, vocab, (rows, 300), device=device, generator=source.generator)
    logits.scatter_add_(1, head, 16 - torch.arange(1, 301, device=device).expand(rows, 300).float().log() * 2)

    def table(name: str, dtype: torch.dtype, neutral: float = 0.0) -> torch.Tensor:
        return torch.full((rows + 1,), parameters.get(name, neutral), dtype=dtype, device=device)

    slots = rows + 1
    penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    is_penalized = any(name in parameters for name in penalties)
    tables = SamplingTables(
        temperature=table("temperature", torch.float32),
        top_k=table("top_k", torch.int32),
        top_p=table("top_p", torch.float32, 1.0),
        min_p=table("min_p", torch.float32),
        seed=torch.arange(slots, device=device),
        features=torch.full((slots,), is_penalized * PENALTIES, dtype=torch.int32, device=device),
        repetition_penalty=table("repetition_penalty", torch.float32, 1.0),
        presence_penalty=table("presence_penalty", torch.float32),
        frequency_penalty=table("frequency_penalty", torch.float32),
        output_counts=torch.zeros(slots, vocab, dtype=torch.int32, device=device),
        prompt_seen=torch.zeros(slots, vocab, dtype=torch.bool, device=device),
        bias=torch.zeros(slots, vocab, device=device),
        min_position=table("min_position", torch.int64),
        stop_ids=torch.full((slots, 64), -1, device=device),
        bad_words=torch.full((slots, 64, RECENT_IDS), -1, device=device),
        bad_word_lengths=torch.zeros(slots, 64, dtype=torch.int32, device=device),
        recent_ids=torch.full((slots, RECENT_IDS), -1, device=device),
    )
    requests = rows // (1 + drafts)
    drafted = torch.zeros(requests, drafts, dtype=torch.int64, device=device)
    positions = torch.arange(rows, device=device) + 1000 * (seed or 0)
    state_index = torch.arange(1, requests + 1, dtype=torch.int32, device=device)
    return logits, drafted, positions, state_index, tables, vocab - 243, None, None


def check(args: tuple[Any, ...]) -> None:
    token, outcome = sample(*args)
    logits, drafts, positions, state_index, tables, *rest = args
    on_cpu = SamplingTables(*(table.cpu() for table in tables))
    rows = (logits.cpu(), drafts.cpu(), positions.cpu(), state_index.cpu())
    wanted, wanted_outcome = sample(*rows, on_cpu, *rest)
    assert torch.equal(outcome.cpu(), wanted_outcome)
    # Noise that differs in its last bit may decide between two ids with nearly equal scores.
    different = int((token.cpu() != wanted).sum())
    assert different <= len(token) // 1000, f"{different} of {len(token)} tokens differ from the reference"


def torch_multinomial(logits: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs = torch.log_softmax(logits, -1)
    token = torch.multinomial(torch.softmax(logits, -1), 1)
    return token, logprobs.gather(1, token)


def torch_greedy(logits: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    token = logits.argmax(-1, keepdim=True)
    return token, torch.log_softmax(logits, -1).gather(1, token)


ALTERNATIVES = {"greedy": torch_greedy, "T=1": torch_multinomial}


def cases(shape: ModelShape, rows: int, settings: Mapping[str, int]) -> list[OpCase]:
    """Return one case for each kind of request; bytes count the logits once."""
    result = []
    for label, parameters in SETTINGS.items():

        def inputs(device: str, seed: int, parameters: dict[str, float] = parameters) -> tuple[Any, ...]:
            return make_inputs(device, seed, shape.vocab, rows, parameters)

        other = ALTERNATIVES.get(label)
        name = other.__name__.replace("_", " ") if other else "none"
        result.append(OpCase(label, inputs, sample, 4 * rows * shape.vocab, check, other, name))
    return result


def make_masked(device: Any, seed: int | None, vocab: int) -> tuple[Any, ...]:
    """Return the arguments of one request's window with masks."""
    *given, _ = make_inputs(device, seed, vocab, ROWS, {}, WINDOW - 1)
    return *given, tensor(device, ROWS, -(-vocab // 32), dtype=INT32)


def make_cut(device: Any, seed: int | None, vocab: int) -> tuple[Any, ...]:
    """Return the arguments of a draft from a head with some of the vocabulary's rows."""
    _, _, positions, state_index, *rest, _, _ = make_inputs(device, seed, vocab, 1, {})
    drafted, ids = (tensor(device, *size, dtype=torch.int64) for size in ((1, 3), (32768,)))
    return tensor(device, 1, 32768), drafted, positions, state_index, *rest, ids, None


def launches(capability: int) -> Iterator[LaunchCase]:
    vocab = SHAPES["27b"].vocab
    window = functools.partial(make_inputs, rows=ROWS, parameters={}, drafts=WINDOW - 1)
    yield launch("window", sample, functools.partial(window, vocab=vocab))
    yield launch("masks", sample, functools.partial(make_masked, vocab=vocab))
    yield launch("cut", sample, functools.partial(make_cut, vocab=vocab))
    yield launch("filter", filter_logits, functools.partial(make_masked, vocab=vocab))
    yield launch("window-small", sample, functools.partial(window, vocab=1024))
