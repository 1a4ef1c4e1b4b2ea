"""Figures of the model card: held-out bits per byte, draft acceptance, example continuations."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from default_model_training.data import END_OF_TEXT, Tokens, heldout_prefixes
from default_model_training.generation import Acceptance, is_looping, measure_acceptance
from default_model_training.model import TrainingModel

WINDOW = 1024
PREFIX, NEW_TOKENS, MTP_STEP = 256, 128, 3


@torch.no_grad()
def bits_per_byte(model: TrainingModel, tokenizer: Tokenizer, heldout: list[Tokens]) -> float:
    """Held-out bits per byte of text, in windows of 1024 tokens that see nothing of the window before."""
    device = next(model.parameters()).device
    start = tokenizer.token_to_id(END_OF_TEXT)
    total_bits, total_bytes = 0.0, 0
    for ids in heldout:
        text = tokenizer.decode(ids.tolist(), skip_special_tokens=False)
        total_bytes += len(text.encode())
        stream = torch.cat([torch.tensor([start]), torch.from_numpy(ids.astype("int64"))]).to(device)
        for at in range(0, len(stream) - 1, WINDOW):
            rows = stream[None, at : at + WINDOW + 1]
            logits = model.logits(model.hidden(rows[:, :-1]))[0]
            total_bits += F.cross_entropy(logits.float(), rows[0, 1:], reduction="sum").item() / math.log(2)
    return total_bits / total_bytes


def evaluate_plain(
    model: TrainingModel, tokenizer: Tokenizer, heldout: list[Tokens], prefixes: int
) -> dict[str, Any]:
    """Bits per byte, and acceptance with the training model's own decoding, in float32.

    From `prefixes` held-out prefixes of 256 tokens, 128 tokens each: greedy, at temperature 0.8 with the
    noise shared by target and draft, and the same tokens with the draft's argmax instead.
    """
    device = next(model.parameters()).device
    if device.type == "cuda":
        torch.set_float32_matmul_precision("highest")
    rows = torch.from_numpy(heldout_prefixes(heldout, prefixes, PREFIX)).to(device)
    valid = tokenizer.get_vocab_size()
    result: dict[str, Any] = {"bits_per_byte": round(bits_per_byte(model, tokenizer, heldout), 4)}
    for name, temperature, argmax_drafts in (
        ("greedy", 0.0, False),
        ("shared_noise", 0.8, False),
        ("argmax_drafts", 0.8, True),
    ):
        result[name], _ = measure_acceptance(
            model, rows, NEW_TOKENS, temperature, valid, seed=0, argmax_drafts=argmax_drafts
        )
    return result


def engine_acceptance(directory: Path, heldout: list[Tokens], prefixes: int) -> dict[str, Any]:
    """Acceptance of the engine in float32 on the CPU, from the prefixes of `evaluate_plain`.

    A round counts when it starts before the 128th new token; prefill's own token is not a round.
    """
    from compiled_mtp import Engine, EngineConfig, SamplingParams

    rows = heldout_prefixes(heldout, prefixes, PREFIX)
    engine = Engine(EngineConfig(model=directory, mtp_step=MTP_STEP, device="cpu", compile="off"))
    result: dict[str, Any] = {}
    for name, temperature in (("greedy", 0.0), ("shared_noise", 0.8)):
        emitted: dict[str, list[int]] = {}
        for seed, row in enumerate(rows.tolist()):
            params = SamplingParams(
                max_tokens=NEW_TOKENS + MTP_STEP, temperature=temperature, seed=seed, ignore_eos=True
            )
            emitted[engine.add_request(prompt_token_ids=row, params=params)] = []
        parts = {part: Acceptance.empty(MTP_STEP) for part in ("all", "normal", "looping")}
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens = emitted[output.request_id]
                if tokens and output.new_token_ids and len(tokens) < NEW_TOKENS:
                    for part in ("all", "looping" if is_looping(tokens) else "normal"):
                        parts[part].add(len(output.new_token_ids) - 1)
                tokens += output.new_token_ids
        result[name] = {part: counts.summary() for part, counts in parts.items()}
    engine.close()
    return result


def example_continuations(directory: Path, prompt_file: Path) -> list[dict[str, str]]:
    """Greedy continuations of 128 tokens, by the engine on the CPU, of the prompts of a .jsonl file."""
    from compiled_mtp import Engine, EngineConfig, SamplingParams

    prompts = [json.loads(line)["prompt"] for line in prompt_file.read_text().splitlines()]
    engine = Engine(EngineConfig(model=directory, mtp_step=MTP_STEP, device="cpu", compile="off"))
    outputs = engine.generate(prompts, SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0))
    engine.close()
    return [
        {"prompt": prompt, "text": output.new_text} for prompt, output in zip(prompts, outputs, strict=True)
    ]
