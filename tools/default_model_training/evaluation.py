"""Figures of the model card: held-out bits per byte, draft acceptance, example continuations."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from compiled_mtp import Engine, EngineConfig, SamplingParams
from default_model_training.data import END_OF_TEXT, Tokens, heldout_prefixes
from default_model_training.model import TrainingModel

WINDOW = 1024
PREFIX, NEW_TOKENS, MTP_STEP = 256, 128, 3
LOOP_WINDOW, LOOP_GRAM = 32, 16


def is_looping(tokens: list[int]) -> bool:
    """Return whether some 16-gram occurs twice within the last 32 of `tokens`."""
    last = tokens[-LOOP_WINDOW:]
    grams = [tuple(last[i : i + LOOP_GRAM]) for i in range(len(last) - LOOP_GRAM + 1)]
    return len(set(grams)) < len(grams)


@dataclass
class Acceptance:
    """Counts over verify rounds; `accepted[i]` of them accepted draft index i."""

    rounds: int
    new_tokens: int
    accepted: list[int]

    @classmethod
    def empty(cls, depths: int) -> Acceptance:
        """Return counts of no rounds."""
        return cls(0, 0, [0] * depths)

    def add(self, accepted: int) -> None:
        """Count one round in which the first `accepted` drafts were right."""
        self.rounds += 1
        self.new_tokens += accepted + 1
        for index in range(accepted):
            self.accepted[index] += 1

    def summary(self) -> dict[str, object]:
        """Return the mean new tokens per round, and the share of rounds that accepted each draft index."""
        rounds = max(self.rounds, 1)
        return {
            "rounds": self.rounds,
            "mean_new_tokens": round(self.new_tokens / rounds, 4),
            "accepted_by_index": [round(count / rounds, 4) for count in self.accepted],
        }


@torch.no_grad()
def bits_per_byte(model: TrainingModel, tokenizer: Tokenizer, heldout: list[Tokens]) -> float:
    """Return the held-out bits per byte of text, in independent windows of 1,024 tokens."""
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


def engine_acceptance(directory: Path, heldout: list[Tokens], prefixes: int) -> dict[str, Any]:
    """Return the acceptance in float32 on the CPU, greedy and at temperature 0.8, from held-out prefixes.

    A round counts if it starts before the 128th new token; prefill's own token is not a round.
    """
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
    """Return greedy continuations of 128 tokens, by the engine on the CPU, of a .jsonl file's prompts."""
    prompts = [json.loads(line)["prompt"] for line in prompt_file.read_text().splitlines()]
    engine = Engine(EngineConfig(model=directory, mtp_step=MTP_STEP, device="cpu", compile="off"))
    outputs = engine.generate(prompts, SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0))
    engine.close()
    return [
        {"prompt": prompt, "text": output.new_text} for prompt, output in zip(prompts, outputs, strict=True)
    ]
