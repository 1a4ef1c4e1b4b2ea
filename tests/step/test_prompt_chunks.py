"""A prompt's numbers depend on positions: the ends of its chunks change no bit of its states and keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compiled_mtp.step import Step
from tests import tiny

PROMPT = [(7 * i + i * i) % 96 for i in range(203)]


def left_by(step: Step, slot: int, length: int) -> list[torch.Tensor]:
    """Return a slot's contents after a prompt: states, conv inputs, keys and values, last hidden state."""
    slots = step.slots
    kept = [tensor[slot].clone() for tensor in (slots.last_hidden, slots.pos, slots.last_token)]
    for layer in step.state_cache.layers:
        # Only the conv inputs that the next rows need; older ring rows depend on other chunks.
        ring = layer.conv_ring.shape[1]
        recent = [position % ring for position in range(max(length - 3, 0), length)]
        kept += [layer.state[slot].clone(), layer.conv_ring[slot][recent]]
    blocks = slots.block_table[slot][slots.block_table[slot] >= 0].long()
    draft = [] if step.kv_cache.draft is None else [step.kv_cache.draft]
    for pages in [*step.kv_cache.layers, *draft]:
        # From [blocks, 2, heads, block_size, dim] to the entries of the prompt's positions.
        kept.append(pages.kv[blocks].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : length - 1].clone())
    return kept


@pytest.mark.parametrize("family", ["dense", "moe"])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_chunks_change_no_bit(family: str, num_threads: int) -> None:
    changes: dict[str, Any] = {"dense": {}, "moe": tiny.MOE}[family]
    results = []
    with tiny.threads(num_threads):
        for chunk in (64, 128, 192, 512):
            step = tiny.build_step(tiny.tiny_config(**changes), 3, max_model_len=512)
            tiny.admit(step, 1, seed=1, temperature=0.8)
            tiny.prefill(step, 1, PROMPT, chunk)
            results.append((chunk, left_by(step, 1, len(PROMPT))))
    _, wanted = results[0]
    for chunk, got in results[1:]:
        for index, (one, other) in enumerate(zip(got, wanted, strict=True)):
            assert torch.equal(one, other), f"chunks of {chunk}: number {index}"
