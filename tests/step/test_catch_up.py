"""Rounds without drafts do not write the draft's KV; `catch_up` writes the missing part, to the bit."""

from __future__ import annotations

import random

import pytest
import torch

from compiled_mtp.step import Step
from tests import tiny

PROMPTS = {1: 70, 2: 1, 3: 33}
CONFIGS = {"dense": tiny.tiny_config(), "moe": tiny.tiny_config(**tiny.MOE)}
WIDTH = 4


def start(step: Step) -> None:
    for slot, length in PROMPTS.items():
        tiny.admit(step, slot, seed=slot, temperature=0.8)
        tiny.prefill(step, slot, [(5 * i * i + i + slot) % 97 for i in range(length)], chain=0)


def draft_kv(step: Step, slot: int) -> torch.Tensor:
    """Return the draft's KV of the pairs up to the slot's pos, [positions, 2, heads, head_dim]."""
    assert step.kv_cache.draft is not None
    count, table = int(step.slots.pos[slot]) + 1, step.slots.block_table[slot].long()
    kv = step.kv_cache.draft.kv[table.clamp(min=0)].permute(0, 3, 1, 2, 4)
    return kv.flatten(0, 1)[1:count]


@torch.no_grad()
def prefill_draft(step: Step, slot: int, first: int, tokens: list[int], hidden: torch.Tensor) -> None:
    """Run a draft prefill of the pairs (token, hidden state before it) at positions from `first` on."""
    rows = tiny.prefill_rows(step, slot, first, len(tokens))
    step.draft_forward(torch.tensor(tokens), hidden, rows)


@pytest.mark.parametrize(("family", "seed"), [("dense", 0), ("dense", 1), ("moe", 2)])
def test_catch_up_writes_what_extending_and_a_fresh_draft_prefill_write(family: str, seed: int) -> None:
    """Requests join late and catch up at random, in any order, beside padding and with a full ring."""
    rng = random.Random(seed)
    step, twin, fresh = (tiny.build_step(CONFIGS[family], WIDTH - 1) for _ in range(3))
    for each in (step, twin, fresh):
        start(each)
    begins = {slot: int(step.slots.pos[slot]) for slot in PROMPTS}
    deferred = dict.fromkeys(PROMPTS, 0)
    tokens: dict[int, list[int]] = {slot: [] for slot in PROMPTS}
    hidden: dict[int, list[torch.Tensor]] = {slot: [] for slot in PROMPTS}
    for _ in range(14):
        slots = [slot for slot in PROMPTS if rng.random() < 0.7]
        late = [slot for slot in slots if deferred[slot] == WIDTH or rng.random() < 0.2]
        if late:
            tiny.catch_up(step, [*rng.sample(late, len(late)), 0])
            deferred |= dict.fromkeys(late, 0)
        new = tiny.decode(step, [*slots, 0], 0, 0)
        assert new == tiny.decode(twin, [*slots, 0], 0, 1)
        for slot, (token,) in zip(slots, new[:-1], strict=True):
            deferred[slot] += 1
            tokens[slot].append(token)
            hidden[slot].append(step.slots.deferred_hidden[slot, int(step.slots.pos[slot]) % WIDTH].clone())
        assert step.slots.num_deferred.tolist()[1:4] == [deferred[slot] for slot in (1, 2, 3)]
        assert not step.slots.drafts[slots].any()
    tiny.catch_up(step, [2, 3, 1])
    assert not step.slots.num_deferred.any()
    for slot in PROMPTS:
        prefill_draft(fresh, slot, begins[slot] + 1, tokens[slot], torch.stack(hidden[slot]))
        ours = draft_kv(step, slot)
        assert torch.equal(ours, draft_kv(twin, slot))
        fresh.slots.pos[slot] = step.slots.pos[slot]
        assert torch.equal(ours, draft_kv(fresh, slot))


def test_a_full_ring_at_the_end_of_max_model_len_writes_nothing_after_it() -> None:
    step = tiny.build_step(CONFIGS["dense"], WIDTH - 1, max_model_len=48)
    assert step.kv_cache.draft is not None
    tiny.admit(step, 1)
    tiny.prefill(step, 1, list(range(45)), chain=0)
    for _ in range(WIDTH):
        tiny.decode(step, [1], 0, 0)
    assert int(step.slots.pos[1]) == 49
    tiny.catch_up(step, [1])
    kv = draft_kv(step, 1)
    assert kv.shape[0] == 47
    assert not kv.isnan().any()
    others = torch.ones(step.kv_cache.num_blocks, dtype=torch.bool)
    others[step.slots.block_table[1].long()] = False
    assert step.kv_cache.draft.kv[others].isnan().all()
