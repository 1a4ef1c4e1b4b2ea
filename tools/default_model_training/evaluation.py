"""Figures of the model card: held-out bits per byte and draft acceptance."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from default_model_training.data import END_OF_TEXT, Tokens, heldout_prefixes
from default_model_training.generation import measure_acceptance
from default_model_training.model import TrainingModel

WINDOW = 1024


@torch.no_grad()
def bits_per_byte(model: TrainingModel, tokenizer: Tokenizer, heldout: list[Tokens]) -> float:
    """Held-out bits per byte of text: every file from its start, in windows of 1024 tokens without carried state."""
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


def evaluate(
    model: TrainingModel, tokenizer: Tokenizer, heldout: list[Tokens], prefixes: int
) -> dict[str, Any]:
    """Bits per byte, and acceptance with plain decoding from `prefixes` held-out prefixes of 256 tokens."""
    device = next(model.parameters()).device
    torch.set_float32_matmul_precision("highest")
    rows = torch.from_numpy(heldout_prefixes(heldout, prefixes, 256)).to(device)
    valid = tokenizer.get_vocab_size()
    result: dict[str, Any] = {"bits_per_byte": round(bits_per_byte(model, tokenizer, heldout), 4)}
    for name, temperature, argmax_drafts in (
        ("greedy", 0.0, False),
        ("shared_noise", 0.8, False),
        ("argmax_drafts", 0.8, True),
    ):
        result[name], _ = measure_acceptance(
            model, rows, 128, temperature, valid, seed=0, argmax_drafts=argmax_drafts
        )
    return result
