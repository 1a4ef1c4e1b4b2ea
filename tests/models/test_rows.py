"""Inputs of a forward: embeddings for token ids, and rotary positions other than the causal ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from compiled_mtp.models.rows import DecodeRows, PrefillRows, Rows
from compiled_mtp.rounds.first_token import rows_at
from compiled_mtp.step import Step
from tests import tiny

PROMPT = 20


@pytest.fixture
def step() -> Step:
    return tiny.build_step(tiny.tiny_config(), 2)


def rows_of(step: Step, start: int, count: int, *, is_prefill: bool) -> Rows:
    """Return rows start .. start + count - 1 of the request in slot 1."""
    state_index, first = torch.tensor([1], dtype=torch.int32), torch.tensor([start])
    if not is_prefill:
        return rows_at(step, state_index, state_index.long(), first, count, first)
    return tiny.prefill_rows(step, 1, start, count)


@torch.no_grad()
def forward(step: Step, inputs: torch.Tensor, rows: Rows) -> torch.Tensor:
    return step.target(inputs, rows, step.kv_cache, step.state_cache, step.cos_sin)


@torch.no_grad()
def test_embeddings_in_place_of_token_ids_give_the_same_bits(step: Step) -> None:
    tokens = torch.arange(PROMPT) * 3 + 1
    hidden: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    for is_embedded in (False, True):
        tiny.poison(step)
        tiny.admit(step, 1)
        for start, end in ((0, 16), (16, PROMPT)):
            rows = rows_of(step, start, end - start, is_prefill=start == 0)
            inputs = step.target.embed(tokens[start:end]) if is_embedded else tokens[start:end]
            hidden[is_embedded].append(forward(step, inputs, rows))
    for ids, embedded in zip(*hidden.values(), strict=True):
        assert ids.isfinite().all()
        assert torch.equal(ids, embedded)


@torch.no_grad()
def test_the_draft_takes_embeddings_as_its_table(step: Step) -> None:
    assert step.draft is not None
    tiny.admit(step, 1)
    tokens, hidden = torch.arange(1, 9), torch.randn(8, step.target.norm.weight.shape[0])
    table = step.target.embed.weight
    drafted = []
    for source, ids in ((table, tokens), (table[tokens], torch.arange(8))):
        rows = rows_of(step, 1, 8, is_prefill=True)
        drafted.append(step.draft(source, ids, hidden, rows, step.kv_cache.draft, step.cos_sin))
    assert drafted[0].isfinite().all()
    assert torch.equal(*drafted)


@torch.no_grad()
def test_rotary_and_causal_positions_are_independent(step: Step) -> None:
    """Shifting all rotary positions changes no result, since scores see only differences.

    Shifting causal positions would.
    """
    tokens = torch.arange(PROMPT) * 4 + 2
    hidden = []
    for distance in (0, 7):
        tiny.poison(step)
        tiny.admit(step, 1)
        rows = rows_of(step, 0, PROMPT, is_prefill=True)
        hidden.append(forward(step, tokens, replace(rows, rotary_positions=rows.rotary_positions + distance)))
    assert (hidden[0] - hidden[1]).abs().max() < 1e-4
    # If all rows share one rotary position, as rows of an image do, the result differs.
    same = replace(rows, rotary_positions=torch.zeros_like(rows.rotary_positions))
    assert (forward(step, tokens, same) - hidden[0]).abs().max() > 1e-3
    # The last row sees only itself and the keys before its causal position.
    seen = rows.causal_positions.clone()
    seen[-1] = 0
    assert (forward(step, tokens, replace(rows, causal_positions=seen)) - hidden[0])[-1].abs().max() > 1e-3


def test_the_type_says_which_rows_they_hold(step: Step) -> None:
    tiny.admit(step, 1)
    assert isinstance(rows_of(step, 0, 4, is_prefill=True), PrefillRows)
    rows = rows_of(step, 4, 2, is_prefill=False)
    assert isinstance(rows, DecodeRows)
    positions, slots = torch.tensor([7, 8]), torch.tensor([70, 80])
    rotary = torch.tensor([3, 4])
    moved = rows.moved(rotary, positions, slots)
    assert isinstance(moved, DecodeRows)
    assert (moved.rotary_positions is rotary, moved.causal_positions is positions) == (True, True)
    assert (moved.slot_mapping is slots, moved.base is rows.base) == (True, True)
