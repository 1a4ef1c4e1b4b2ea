"""The contract of the step: the same tokens and state, whatever is drafted and whichever requests share the
batch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import pytest
import torch

from compiled_mtp.graphs.buckets import RoundShape
from compiled_mtp.ops.gdn_verify import gdn_verify
from compiled_mtp.rounds.first_token import first_token
from compiled_mtp.step import Step
from compiled_mtp.step_output import _LOGPROB_WIDTH, OutputRow, StepOutput
from tests import tiny
from tests.ops.gdn_cases import fold

CONFIGS = {"dense": tiny.tiny_config(), "moe": tiny.tiny_config(**tiny.MOE)}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PROMPTS = {1: 70, 2: 1, 3: 65, 4: 2}
TEMPERATURES = {1: 0.0, 2: 0.8, 3: 1.0, 4: 0.8}
COUNT = 24
# From each prompt's end on, so many tokens go around the longest ring, of 16 entries.
RING = 17


def prompt_of(slot: int) -> list[int]:
    return [(7 * i * i + 3 * i + slot) % 97 for i in range(PROMPTS[slot])]


def start(step: Step, slots: list[int]) -> dict[int, list[int]]:
    for slot in slots:
        tiny.admit(step, slot, seed=100 + slot, temperature=TEMPERATURES[slot])
    return {slot: [tiny.prefill(step, slot, prompt_of(slot))] for slot in slots}


@cache
def plain_stream(family: str, dtype: str, slot: int) -> list[int]:
    """Decode a request alone, one token at a time."""
    step = tiny.build_step(CONFIGS[family], 0, dtype=DTYPES[dtype])
    tokens = start(step, [slot])[slot]
    while len(tokens) < COUNT + 8:
        tokens += tiny.decode(step, [slot])[0]
    return tokens


def force(step: Step, slot: int, stream: list[int], done: int, num_right: int) -> None:
    """Set the first `num_right` drafts of a slot to those of the stream and the others to wrong ids."""
    for k in range(step.mtp_step):
        following = stream[done + k] if done + k < len(stream) else 0
        step.slots.drafts[slot, k] = following if k < num_right else (following + 1 + k) % 97


# Experts change no part of a round but the FFN: each depth with each kind of drafts has them in one dtype.
DRAFTS = ["own", "right", "wrong", "random", "nan"]
ROUNDS = [
    (family, dtype, mtp_step, drafts)
    for row, mtp_step in enumerate([1, 2, 3, 7])
    for column, drafts in enumerate(DRAFTS)
    for index, dtype in enumerate(DTYPES)
    for family in CONFIGS
    if family == "dense" or index == (row + column) % 2
]


@pytest.mark.parametrize(("family", "dtype", "mtp_step", "drafts"), ROUNDS)
def test_tokens_do_not_depend_on_drafts_or_batch(family: str, dtype: str, mtp_step: int, drafts: str) -> None:
    step = tiny.build_step(CONFIGS[family], mtp_step, dtype=DTYPES[dtype])
    if drafts == "nan":
        assert step.draft is not None
        step.draft.norm.weight.data.fill_(float("nan"))
    out = start(step, [1, 2, 3, 4])
    rng = random.Random(mtp_step)
    rounds = 0
    while min(map(len, out.values())) < RING:
        rounds += 1
        live = [slot for slot in out if len(out[slot]) < RING]
        rng.shuffle(live)
        live = live[: rng.randint(1, len(live))]
        expected_new = {}
        for slot in live:
            stream = plain_stream(family, dtype, slot)
            num_right = {"right": mtp_step, "wrong": 0, "random": rng.randint(0, mtp_step)}.get(drafts)
            if num_right is not None:
                force(step, slot, stream, len(out[slot]), num_right)
                expected_new[slot] = num_right + 1
        order = live + [0] * rng.randint(0, 2)
        for slot, tokens in zip(order, tiny.decode(step, order), strict=True):
            if slot == 0:
                assert tokens == []
                continue
            if slot in expected_new and len(out[slot]) + mtp_step + 1 <= RING:
                assert len(tokens) == expected_new[slot]
            out[slot] += tokens
    for slot, tokens in out.items():
        assert tokens[:RING] == plain_stream(family, dtype, slot)[:RING]


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_tokens_do_not_depend_on_speculation_at_any_thread_count(count: int) -> None:
    with tiny.threads(count):
        streams = []
        for mtp_step in (0, 3):
            step = tiny.build_step(CONFIGS["dense"], mtp_step)
            out = start(step, [1, 2, 3])
            while min(map(len, out.values())) < 12:
                for slots in [[1, 3, 2]] if mtp_step else [[2], [1], [3]]:
                    for slot, tokens in zip(slots, tiny.decode(step, slots), strict=True):
                        out[slot] += tokens
            streams.append([out[slot][:12] for slot in (1, 2, 3)])
    assert streams[0] == streams[1]


def kv_of(step: Step, kv: torch.Tensor, slot: int, first: int, end: int) -> torch.Tensor:
    """Return keys and values of positions first..end-1 of a slot, [n, 2, heads, head_dim]."""
    positions = torch.arange(first, end)
    blocks = step.slots.block_table[slot][positions // tiny.BLOCK_SIZE].long()
    assert (blocks > 0).all()
    return kv[blocks, :, :, positions % tiny.BLOCK_SIZE]


def committed_state(step: Step, layer: torch.nn.Module, slot: int) -> torch.Tensor:
    state = layer.state.clone()
    index = torch.tensor([slot], dtype=torch.int32)
    rings = (ring.clone() for ring in (layer.ring_k, layer.ring_u, layer.ring_g))
    cursors = step.slots.base[slot : slot + 1], step.slots.pos[slot : slot + 1]
    fold(gdn_verify, state, *rings, index, *cursors)
    return state[slot]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mtp_step", [1, 3, 7])
def test_state_equals_that_of_single_steps_bit_for_bit(dtype: str, mtp_step: int) -> None:
    config = CONFIGS["dense"]
    step = tiny.build_step(config, mtp_step, dtype=DTYPES[dtype], ring_step=7)
    plain = tiny.build_step(config, 0, dtype=DTYPES[dtype], ring_step=7)
    out, single = start(step, [1, 2, 3]), start(plain, [1, 2, 3])
    rng = random.Random(0)
    # Every number of accepted drafts, for every request in another order.
    orders = {slot: rng.sample(range(mtp_step + 1), mtp_step + 1) for slot in out}
    for round_index in range(mtp_step + 1):
        for slot in out:
            stream = plain_stream("dense", dtype, slot)
            force(step, slot, stream, len(out[slot]), orders[slot][round_index])
        for slot, tokens in zip(out, tiny.decode(step, list(out)), strict=True):
            if len(out[slot]) + mtp_step < COUNT:
                assert len(tokens) == orders[slot][round_index] + 1
            out[slot] += tokens
            while len(single[slot]) < len(out[slot]):
                single[slot] += tiny.decode(plain, [slot])[0]
            compare_states(step, plain, slot)
    assert out == single


def compare_states(step: Step, plain: Step, slot: int) -> None:
    pos = int(step.slots.pos[slot])
    assert pos == int(plain.slots.pos[slot])
    assert int(step.slots.last_token[slot]) == int(plain.slots.last_token[slot])
    for ours, theirs in zip(step.state_cache.layers, plain.state_cache.layers, strict=True):
        assert torch.equal(committed_state(step, ours, slot), committed_state(plain, theirs, slot))
        recent = torch.arange(max(pos - 3, 0), pos) % step.state_cache.ring_length
        assert torch.equal(ours.conv_ring[slot, recent], theirs.conv_ring[slot, recent])
    for ours, theirs in zip(step.kv_cache.layers, plain.kv_cache.layers, strict=True):
        assert torch.equal(kv_of(step, ours.kv, slot, 0, pos), kv_of(plain, theirs.kv, slot, 0, pos))


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("mtp_step", [1, 3])
def test_draft_kv_holds_the_pairs_of_a_fresh_draft_prefill(family: str, mtp_step: int) -> None:
    step = tiny.build_step(CONFIGS[family], mtp_step)
    out = start(step, [1, 2, 3])
    rng = random.Random(1)
    for _ in range(5):
        for slot in out:
            force(step, slot, plain_stream(family, "float32", slot), len(out[slot]), rng.randint(0, mtp_step))
        for slot, tokens in zip(out, tiny.decode(step, list(out)), strict=True):
            out[slot] += tokens
        for slot in out:
            pos = int(step.slots.pos[slot])
            fresh = tiny.build_step(CONFIGS[family], mtp_step)
            tiny.admit(fresh, slot)
            tokens = prompt_of(slot) + out[slot]
            assert len(tokens) == pos + 1
            tiny.prefill(fresh, slot, tokens)
            assert step.kv_cache.draft is not None
            assert fresh.kv_cache.draft is not None
            ours = kv_of(step, step.kv_cache.draft.kv, slot, 1, pos + 1)
            expected = kv_of(fresh, fresh.kv_cache.draft.kv, slot, 1, pos + 1)
            # Float32 by another route (chunked prefill against single steps), values of scale 1 to 5.
            torch.testing.assert_close(ours, expected, atol=2e-4, rtol=2e-4)


def test_the_draft_kv_follows_at_every_depth() -> None:
    """Many depths in a request's life, none twice: the same tokens, and a fresh draft prefill's pairs."""
    step = tiny.build_step(CONFIGS["dense"], 7)
    out = {}
    for slot in (1, 2, 3):
        tiny.admit(step, slot, seed=100 + slot, temperature=TEMPERATURES[slot])
        out[slot] = [tiny.prefill(step, slot, prompt_of(slot), chain=3)]
    rng = random.Random(3)
    depths = ((3, 1), (1, 0), (0, 7), (7, 3), (3, 0), (7, 0), (0, 0), (0, 0), (7, 3))
    for last, (verify, chain) in pairwise(((0, 0), *depths)):
        if last == (0, 0) != (verify, chain):
            tiny.catch_up(step, [3, 1, 2])
        for slot in out:
            stream = plain_stream("dense", "float32", slot)
            force(step, slot, stream, len(out[slot]), rng.randint(0, verify))
        new = tiny.decode(step, [3, 1, 2], verify, chain)
        for slot, tokens in zip((3, 1, 2), new, strict=True):
            assert len(tokens) <= verify + 1
            out[slot] += tokens
    for slot, tokens in out.items():
        pos = int(step.slots.pos[slot])
        assert tokens == plain_stream("dense", "float32", slot)[: len(tokens)]
        assert pos + 1 == len(prompt_of(slot)) + len(tokens)
        fresh = tiny.build_step(CONFIGS["dense"], 3)
        tiny.admit(fresh, slot)
        tiny.prefill(fresh, slot, prompt_of(slot) + tokens)
        assert step.kv_cache.draft is not None
        assert fresh.kv_cache.draft is not None
        ours = kv_of(step, step.kv_cache.draft.kv, slot, 1, pos + 1)
        expected = kv_of(fresh, fresh.kv_cache.draft.kv, slot, 1, pos + 1)
        torch.testing.assert_close(ours, expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("mtp_step", [1, 3, 7])
def test_the_draft_reads_only_written_entries(mtp_step: int) -> None:
    """NaN in unwritten cache entries would make drafts id 0, or other ids than zeros there would."""
    drafts = []
    for is_poisoned in (True, False):
        step = tiny.build_step(CONFIGS["dense"], mtp_step, is_poisoned=is_poisoned)
        out = start(step, [1, 2, 3])
        rng = random.Random(2)
        seen = [step.slots.drafts[1:4].clone()]
        for _ in range(6):
            for slot in out:
                stream = plain_stream("dense", "float32", slot)
                force(step, slot, stream, len(out[slot]), rng.randint(0, mtp_step))
            for slot, tokens in zip(out, tiny.decode(step, list(out)), strict=True):
                out[slot] += tokens
            seen.append(step.slots.drafts[1:4].clone())
        drafts.append(torch.stack(seen))
    assert torch.equal(drafts[0], drafts[1])
    assert len(drafts[0].unique()) > 10


def test_nothing_is_written_outside_reserved_pages_and_own_slots() -> None:
    step = tiny.build_step(CONFIGS["dense"], 3)
    for slot in (1, 2):
        tiny.admit(step, slot, blocks=2)
    tiny.prefill(step, 1, prompt_of(1)[:20])
    tiny.prefill(step, 2, prompt_of(1)[:3])
    for _ in range(6):
        # Slot 1 soon needs more than its two reserved blocks of 16.
        force(step, 1, [0] * 200, 0, 0)
        tiny.decode(step, [1, 2, 0])
    reserved = step.slots.block_table[step.slots.block_table > 0].long()
    assert len(reserved) == 4
    others = torch.ones(step.kv_cache.num_blocks, dtype=torch.bool)
    others[reserved] = False
    layers = [*step.kv_cache.layers, step.kv_cache.draft]
    assert all(layer.kv[others].isnan().all() for layer in layers)
    for layer in step.state_cache.layers:
        assert layer.state[3:].isnan().all()
        assert layer.conv_ring[3:].isnan().all()
        assert layer.ring_u[3:].isnan().all()
    assert int(step.slots.pos[0]) == 0
    assert int(step.slots.base[0]) == 0
    assert int(step.slots.last_token[0]) == 0


@pytest.mark.parametrize("mtp_step", [0, 3])
def test_the_last_positions_of_max_model_len_are_right_and_none_after_them_is_written(mtp_step: int) -> None:
    long = tiny.build_step(CONFIGS["dense"], 0, max_model_len=128)
    short = tiny.build_step(CONFIGS["dense"], mtp_step, max_model_len=80)
    streams = []
    for step in (long, short):
        tiny.admit(step, 1)
        tokens = [tiny.prefill(step, 1, prompt_of(1))]
        while len(tokens) < 14:
            tokens += tiny.decode(step, [1])[0]
        streams.append(tokens)
    # The prompt has 70 tokens: 10 tokens fit into 80.
    assert streams[0][:10] == streams[1][:10]


def outputs(step: Step, slots: list[int], mtp_step: int) -> Sequence[OutputRow]:
    """Return a round's outputs, whether or not its logits are finite."""
    index = torch.tensor(slots, dtype=torch.int32)
    with torch.no_grad():
        return StepOutput.unpack(step.decode(index, RoundShape(mtp_step, mtp_step)), mtp_step + 1)


def test_the_padding_keeps_no_drafts() -> None:
    """Padding rows of the next round verify ids 0 whatever the last one left."""
    # With caches of NaN the draft would draw id 0.
    step = tiny.build_step(CONFIGS["dense"], 3, is_poisoned=False)
    start(step, [1, 2])
    for slots in ([1, 0, 2, 0], [0, 2], [1, 0]):
        tiny.decode(step, slots)
        assert not step.slots.drafts[0].any()
    assert step.slots.drafts[1:3].any(dim=1).all()


@pytest.mark.parametrize("mtp_step", [0, 3])
@pytest.mark.parametrize("where", ["weight", "final norm"])
def test_logits_that_are_not_finite_are_reported_at_once(mtp_step: int, where: str) -> None:
    step = tiny.build_step(CONFIGS["dense"], mtp_step)
    tiny.admit(step, 1)
    tiny.prefill(step, 1, prompt_of(1))
    if where == "weight":
        step.target.layers[1].ffn.down.weight.data[3, 5] = float("nan")
    else:
        step.target.norm.weight.data[7] = float("inf")
    row, padding = outputs(step, [1, 0], mtp_step)
    assert row.num_new >= 1
    assert row.num_finite == padding.num_finite == padding.num_new == 0
    packed = first_token(step, torch.tensor([1], dtype=torch.int32), mtp_step)
    (first,) = StepOutput.unpack(packed, 1)
    # It reads an earlier hidden state: only its own norm comes after.
    assert (first.num_new, first.num_finite) == (1, 1)
    step.slots.last_hidden[1, 3] = float("nan")
    packed = first_token(step, torch.tensor([1], dtype=torch.int32), mtp_step)
    assert StepOutput.unpack(packed, 1)[0].num_finite == 0


@pytest.mark.parametrize("count", [1, 40])
@pytest.mark.parametrize("has_matches", [False, True])
def test_drafts_that_no_request_wants_may_be_left_out(count: int, has_matches: bool) -> None:
    """Every other column is read as it was packed, beside log probabilities too."""
    columns = torch.arange(count * 9).view(count, 9)
    matches = columns[:, 7:9] if has_matches else None
    packed = StepOutput(columns[:, 0], columns[:, 1], columns[:, 2:4], columns[:, 4:7], matches).pack()
    for num_logprobs in (0, 1):
        added = torch.full((count, num_logprobs * 2 * _LOGPROB_WIDTH), -7)
        named = {"num_logprobs": num_logprobs, "has_matches": has_matches}
        whole = StepOutput.unpack(torch.cat((packed, added), dim=1), 2, **named)
        cut = StepOutput.unpack(torch.cat((packed, added), dim=1), 2, wants_drafts=False, **named)
        assert whole.drafts(count) == columns[:, 4:7].tolist()
        assert [one.tokens for one in cut] == columns[:, 2:4].tolist()
        assert (
            cut.matches(count)
            == whole.matches(count)
            == (columns[:, 7:9].tolist() if has_matches else [[]] * count)
        )
        assert [one._replace(drafts=[]) for one in cut] == [one._replace(drafts=[]) for one in whole]


@pytest.mark.parametrize("mtp_step", [0, 3])
def test_a_state_that_is_not_finite_ends_only_its_own_request(mtp_step: int) -> None:
    step = tiny.build_step(CONFIGS["dense"], mtp_step)
    out = start(step, [1, 2, 3])
    for layer in step.state_cache.layers:
        layer.state[2] = float("nan")
    while min(len(out[1]), len(out[3])) < COUNT:
        rows = outputs(step, [3, 2, 1], mtp_step)
        assert rows[1].num_finite == 0 < rows[1].num_new
        for row, slot in ((rows[0], 3), (rows[2], 1)):
            assert row.num_new == row.num_finite
            out[slot] += row.tokens[: row.num_new]
    for slot in (1, 3):
        stream = plain_stream("dense", "float32", slot)
        assert out[slot][: len(stream)] == stream[: len(out[slot])]


@pytest.mark.parametrize("num_right", [0, 1, 2, 3])
def test_a_row_that_is_not_finite_counts_where_it_emits(num_right: int) -> None:
    """Draft 2 has an embedding that is not finite: rows 2 and 3 have no logits to draw from.

    Row 2 emits when two drafts or more are right.
    """
    config = tiny.tiny_config(tie_word_embeddings=False)
    plain = tiny.build_step(config, 0)
    tiny.admit(plain, 1)
    stream = [tiny.prefill(plain, 1, prompt_of(1))]
    while len(stream) < 16:
        stream += tiny.decode(plain, [1])[0]
    step = tiny.build_step(config, 3)
    tiny.admit(step, 1)
    tokens = [tiny.prefill(step, 1, prompt_of(1))]
    force(step, 1, stream, 1, num_right)
    step.target.embed.weight.data[step.slots.drafts[1, 1]] = float("nan")
    (row,) = outputs(step, [1], 3)
    if num_right < 2:
        assert row.num_new == num_right + 1
    assert row.num_finite == min(row.num_new, 2)
    tokens += row.tokens[: row.num_finite]
    if num_right < 2:
        # That row was rejected, and no later round reads its entries.
        while len(tokens) < 12:
            (row,) = outputs(step, [1], 0)
            assert row.num_finite == row.num_new == 1
            tokens += row.tokens
    assert tokens == stream[: len(tokens)]
