"""Plain decoding with the training model, and draft acceptance measured on what it decoded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from default_model_training.model import DecodeCache, TrainingModel

LOOP_WINDOW, LOOP_GRAM = 32, 16


def gumbel(seed: int, position: int, rows: int, vocabulary: int, device: torch.device) -> Tensor:
    """The noise [rows, vocabulary] of one position, the same for whoever asks, float32."""
    generator = torch.Generator(device).manual_seed(seed * 1_000_003 + position)
    uniform = torch.rand(rows, vocabulary, generator=generator, device=device).clamp_(1e-9, 1 - 1e-7)
    return -torch.log(-torch.log(uniform))


def choose(logits: Tensor, temperatures: Tensor, noise: Tensor | None, valid: int) -> Tensor:
    """Tokens [B] from logits [B, V]: the argmax where the temperature is 0, else with `noise` added."""
    logits = logits[:, :valid].float()
    if noise is None:
        return logits.argmax(-1)
    scale = temperatures.clamp_min(1e-5)[:, None]
    noisy = logits / scale + noise[:, :valid]
    return torch.where(temperatures > 0, noisy.argmax(-1), logits.argmax(-1))


@torch.no_grad()
def generate(
    model: TrainingModel, prefixes: Tensor, count: int, temperatures: Tensor, valid: int, seed: int
) -> Tensor:
    """Rows [B, N + count]: `prefixes` [B, N] and `count` tokens decoded from each, never past `valid` ids.

    `temperatures` [B]; the noise is that of `gumbel` by absolute position.
    """
    rows, length = prefixes.shape
    cache = DecodeCache()
    logits = model.logits(model.hidden(prefixes, cache, length + count)[:, -1])
    out = [prefixes]
    for position in range(length, length + count):
        noise = None
        if bool((temperatures > 0).any()):
            noise = gumbel(seed, position, rows, logits.shape[-1], logits.device)
        token = choose(logits, temperatures, noise, valid)
        out.append(token[:, None])
        if position + 1 < length + count:
            logits = model.decode(token, cache)
    return torch.cat(out, dim=1)


def is_looping(tokens: list[int]) -> bool:
    """Whether some 16-gram occurs twice within the last 32 of `tokens`."""
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
        """No rounds yet."""
        return cls(0, 0, [0] * depths)

    def add(self, accepted: int) -> None:
        """Count one round in which the first `accepted` drafts were right."""
        self.rounds += 1
        self.new_tokens += accepted + 1
        for index in range(accepted):
            self.accepted[index] += 1

    def summary(self) -> dict[str, object]:
        """Mean new tokens a round, and the share of rounds that accepted each draft index."""
        rounds = max(self.rounds, 1)
        return {
            "rounds": self.rounds,
            "mean_new_tokens": round(self.new_tokens / rounds, 4),
            "accepted_by_index": [round(count / rounds, 4) for count in self.accepted],
        }


@torch.no_grad()
def measure_acceptance(
    model: TrainingModel,
    prefixes: Tensor,
    count: int,
    temperature: float,
    valid: int,
    seed: int,
    depths: int = 3,
    argmax_drafts: bool = False,
) -> tuple[dict[str, dict[str, object]], Tensor]:
    """Acceptance of `depths` drafts a round on `count` decoded tokens, and the decoded rows.

    The tokens do not depend on the drafts, so they are decoded first; the drafts of all rounds are then one
    teacher-forced pass: a draft counts only when those before it were right, and then its inputs were the
    true tokens. Rounds after a repeated 16-gram are under `looping`, the others under `normal`.
    """
    length = prefixes.shape[1]
    temperatures = torch.full((len(prefixes),), temperature, device=prefixes.device)
    rows = generate(model, prefixes, count + depths, temperatures, valid, seed)
    hidden = model.hidden(rows)
    right = []
    for draft in model.drafts(rows, hidden, depths):
        logits = model.logits(draft)
        columns = []
        for position in range(length, length + count + depths):
            noise = None
            if temperature > 0 and not argmax_drafts:
                noise = gumbel(seed, position, len(rows), logits.shape[-1], rows.device)
            guess = choose(logits[:, position - 1], temperatures, noise, valid)
            columns.append(guess == rows[:, position])
        right.append(torch.stack(columns, dim=1).tolist())
    parts = {"normal": Acceptance.empty(depths), "looping": Acceptance.empty(depths)}
    every = Acceptance.empty(depths)
    for row, tokens in enumerate(rows.tolist()):
        last = length
        while last < length + count - 1:
            accepted = 0
            while accepted < depths and right[accepted][row][last + accepted + 1 - length]:
                accepted += 1
            part = "looping" if is_looping(tokens[length : last + 1]) else "normal"
            parts[part].add(accepted)
            every.add(accepted)
            last += accepted + 1
    return {"all": every.summary()} | {name: part.summary() for name, part in parts.items()}, rows
