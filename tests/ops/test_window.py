"""read_window and accept_window: a round's rows and its commit, checked one request at a time."""

from __future__ import annotations

import pytest
import torch

from compiled_mtp.ops.features import ALL_MASKED, BAD_WORDS, DRAWN, NOT_FINITE, PENALTIES, RECENT_IDS
from compiled_mtp.ops.window import Cursors, accept_window, read_window
from compiled_mtp.ops.window.reference import position_hash
from tests.ops.harness import check_compiles, check_launch, check_registration
from tests.ops.window_cases import (
    BLOCK_SIZE,
    BLOCKS,
    END,
    HASH_LIMIT,
    SLOTS,
    accept_arguments,
    cursors_of,
    history_of,
    kv_index_of,
    make_forced,
    make_lookup,
    make_slots,
    read_arguments,
)

ORDERS = ([1], [2, 0], [6, 3, 8], [5, 8, 1, 7, 0, 2, 4, 6, 3, 0])
STEPS = (*range(8), 12, 15)


@pytest.mark.parametrize("mtp_step", STEPS)
@pytest.mark.parametrize("order", ORDERS)
def test_a_window_is_the_last_token_and_its_drafts(mtp_step: int, order: list[int]) -> None:
    slots = make_slots(mtp_step, "cpu")
    base, start, tokens, positions, kv_index, sampled, table = read_window(
        *read_arguments(slots, order, mtp_step)
    )
    assert start.tolist() == [int(slots["pos"][slot]) for slot in order]
    assert base.tolist() == [int(slots["base"][slot]) for slot in order]
    assert torch.equal(table, slots["block_table"][order])
    for request, slot in enumerate(order):
        for k in range(mtp_step + 1):
            row, wanted = request * (mtp_step + 1) + k, int(slots["pos"][slot]) + k
            token = slots["drafts"][slot, k - 1] if k else slots["last_token"][slot]
            expected = kv_index_of(slots["block_table"][slot].tolist(), wanted)
            assert int(tokens[row]) == int(token)
            assert (int(positions[row]), int(kv_index[row])) == expected
            assert int(sampled[row]) == wanted + 1


@pytest.mark.parametrize("mtp_step", STEPS)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("hash_limit", [None, -1, 0, HASH_LIMIT, 65536])
def test_the_leading_right_drafts_are_committed(
    mtp_step: int, order: list[int], hash_limit: int | None
) -> None:
    slots = make_slots(mtp_step, "cpu")
    before = {name: tensor.clone() for name, tensor in slots.items()}
    window = read_window(*read_arguments(slots, order, mtp_step))
    arguments = accept_arguments(slots, window, order, mtp_step, hash_limit)
    result, row, bonus, positions, kv_index, chain, chain_slots = accept_window(*arguments)
    tokens, drawn = arguments[0].view(len(order), -1), arguments[1].view(len(order), -1)
    outcomes = arguments[2].view(len(order), -1).tolist()
    assert torch.equal(result[:, 2:], drawn)
    assert chain.shape == chain_slots.shape == (mtp_step, len(order) + len(order) % 2)
    for request, slot in enumerate(order):
        pos, table = int(before["pos"][slot]), before["block_table"][slot].tolist()
        kept = 0
        while kept < mtp_step:
            hashed = int(position_hash(torch.tensor(pos + kept + 1), slot))
            is_right = tokens[request, kept + 1] == drawn[request, kept]
            if not (is_right if hash_limit in (None, -1) else hashed < hash_limit):
                break
            kept += 1
        num_new = kept + 1 if slot else 0
        assert int(result[request, 0]) == num_new
        leading = next((k for k, outcome in enumerate(outcomes[request]) if outcome != DRAWN), num_new)
        is_masked = leading < num_new and outcomes[request][leading] == ALL_MASKED
        assert int(result[request, 1]) == (-1 - leading if is_masked else min(leading, num_new))
        counts, recent = before["output_counts"][slot].tolist(), before["recent_ids"][slot].tolist()
        if int(before["features"][slot]) & (PENALTIES | BAD_WORDS):
            for k in range(num_new):
                counts[drawn[request, k]] += 1
                recent[(pos + 1 + k) % RECENT_IDS] = int(drawn[request, k])
        assert slots["output_counts"][slot].tolist() == counts
        assert slots["recent_ids"][slot].tolist() == recent
        assert int(row[request]) == request * (mtp_step + 1) + kept
        last = int(drawn[request, kept]) if slot else 0
        assert int(bonus[request]) == int(slots["last_token"][slot]) == last
        assert (int(slots["base"][slot]), int(slots["pos"][slot])) == (pos, pos + num_new)
        for k in range(mtp_step + 1):
            at = request * (mtp_step + 1) + k
            assert (int(positions[at]), int(kv_index[at])) == kv_index_of(table, pos + 1 + k)
        for i in range(mtp_step):
            expected = kv_index_of(table, pos + num_new + 1 + i)
            assert (int(chain[i, request]), int(chain_slots[i, request])) == expected
    for slot in set(range(SLOTS)) - set(order):
        for name in ("base", "pos", "last_token"):
            assert slots[name][slot] == before[name][slot]


@pytest.mark.parametrize("mtp_step", STEPS)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("hash_limit", [None, HASH_LIMIT])
def test_forced_ids_take_the_place_of_samples(
    mtp_step: int, order: list[int], hash_limit: int | None
) -> None:
    found = []
    for is_forced in (True, False):
        slots = make_slots(mtp_step, "cpu")
        window = read_window(*read_arguments(slots, order, mtp_step))
        forced = make_forced(slots, mtp_step)
        arguments = accept_arguments(slots, window, order, mtp_step, hash_limit, forced)
        if not is_forced:
            sampled = arguments[1].clone()
            for row in range(len(sampled)):
                slot, position = order[row // (mtp_step + 1)], int(window.sampled_positions[row])
                if position < END and int(forced[slot, position]) >= 0:
                    sampled[row] = forced[slot, position]
            assert not torch.equal(sampled, arguments[1])
            arguments = (arguments[0], sampled, *arguments[2:-1], None)
        found.append([*accept_window(*arguments), *slots.values()])
    for forced, replaced in zip(*found, strict=True):
        assert torch.equal(forced, replaced)


@pytest.mark.parametrize("seed", range(40))
def test_the_route_of_a_cpu_is_the_specification(seed: int) -> None:
    """Compare every tensor of both, over requests at any stage, blocks at any position and all outcomes, with
    states that are stored and states that are not."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    mtp_step, batch = seed % 16, int(draw(1, 7))
    width = mtp_step + 1
    index = torch.randperm(SLOTS, generator=generator)[:batch].to(torch.int32)
    index[draw(0, 2, batch) * draw(0, 2, batch) > 0] = 0
    given = make_slots(mtp_step, "cpu")
    given["pos"][1:] = draw(0, END + 3, SLOTS - 1)
    given["base"] = (given["pos"] - draw(0, 9, SLOTS)).clamp(min=0)
    given["block_table"][1:] = draw(-1, 4, SLOTS - 1, BLOCKS).to(torch.int32)
    given["features"] = draw(0, 64, SLOTS).to(torch.int32)
    # Few ids, so that some drafts are right and some tokens repeat.
    given["drafts"][1:] = draw(1, 3, *given["drafts"][1:].shape)
    sampled = draw(1, 3, batch * width)
    outcome = torch.tensor([DRAWN, DRAWN, DRAWN, NOT_FINITE, ALL_MASKED])[draw(0, 5, batch * width)]
    limit = None if seed % 3 else torch.tensor([int(draw(-1, 65537))])
    forced = draw(-1, 3, SLOTS, END).to(torch.int32) if seed % 2 else None
    found = []
    for read, accept in ((read_window, accept_window), (read_window.reference, accept_window.reference)):
        slots = {name: tensor.clone() for name, tensor in given.items()}
        sizes = (mtp_step, BLOCK_SIZE, END)
        window = read(index, cursors_of(slots), slots["drafts"], slots["block_table"], *sizes)
        drawn = (window.tokens, sampled, outcome.to(torch.uint8))
        commit = (index, window.pos, window.block_table, cursors_of(slots), history_of(slots))
        token_ids, matched = make_lookup("cpu") if seed % 5 else (None, None)
        accepted = accept(*drawn, *commit, *sizes, limit, forced, token_ids, matched, seed % 4 * 6)
        written = slots["pos"] if token_ids is None else token_ids
        found.append([*window, *accepted, *slots.values(), written])
    for ours, expected in zip(*found, strict=True):
        assert ours.dtype == expected.dtype
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("mtp_step", [0, 3, 15])
def test_new_tokens_are_written_at_their_positions(mtp_step: int) -> None:
    """Also of slots near `END`, where some tokens have no position."""
    order = [6, 3, 0, 7, 1]
    slots = make_slots(mtp_step, "cpu")
    window = read_window(*read_arguments(slots, order, mtp_step))
    token_ids, _ = make_lookup("cpu")
    expected = token_ids.clone()
    result = accept_window(*accept_arguments(slots, window, order, mtp_step), token_ids)
    for request, slot in enumerate(order):
        first, count = int(window.pos[request]) + 1, int(result.packed[request, 0])
        new = result.packed[request, 2 : 2 + count].to(torch.int32)
        expected[slot, first : first + count] = new[: max(END - first, 0)]
    assert torch.equal(token_ids, expected)


def test_a_hash_decides_no_looked_up_drafts() -> None:
    order = [1, 2, 3, 4]
    limit, (token_ids, matched) = 65536, make_lookup("cpu")
    slots = make_slots(3, "cpu")
    window = read_window(*read_arguments(slots, order, 3))
    arguments = accept_arguments(slots, window, order, 3, limit)
    result = accept_window(*arguments, token_ids, matched)
    # Odd slots have looked-up drafts: `accept_arguments` makes requests 0 and 2 keep 0 and 2 of them.
    assert result.packed[:, 0].tolist() == [1, 4, 3, 4]


def test_hashes_of_neighbours_are_independent() -> None:
    """Synthetic drafts are then accepted like a model's: each with the same chance, whatever came before."""
    positions = torch.arange(1, 60_001)
    is_kept, is_kept_beside = (position_hash(positions, slot) < 0.7 * 65536 for slot in (1, 2))
    assert abs(float((is_kept & is_kept_beside).float().mean()) - 0.49) < 0.012
    for count in range(1, 6):
        share = is_kept[: 60_000 // count * count].view(-1, count).all(1).float().mean()
        assert abs(float(share) - 0.7**count) < 0.012


def test_the_chain_is_padded_to_even_batches() -> None:
    slots = make_slots(3, "cpu")
    window = read_window(*read_arguments(slots, [3, 2, 5], 3))
    *_, chain, chain_slots = accept_window(*accept_arguments(slots, window, [3, 2, 5], 3))
    assert chain[:, 3].tolist() == [0] * 3
    assert chain_slots[:, 3].tolist() == [-1] * 3


def test_registration_and_compile() -> None:
    read, accept = [], []
    for order in ([1], [6, 3, 8]):
        slots = make_slots(3, "cpu")
        read.append(read_arguments(slots, order, 3))
        forced = make_forced(slots, 3)
        own = accept_arguments(slots, read_window(*read[-1]), order, 3, HASH_LIMIT, forced)
        accept.append((*own, *make_lookup("cpu"), 0))
    check_registration(torch.ops.compiled_mtp.read_window.default, read[1])
    check_registration(torch.ops.compiled_mtp.accept_window.default, accept[1])
    check_compiles(read_window, read)
    check_compiles(accept_window, accept)


def test_bad_arguments_raise() -> None:
    slots = make_slots(3, "cpu")
    read = read_arguments(slots, [1, 2], 3)
    forced = make_forced(slots, 3)
    accept = accept_arguments(slots, read_window(*read), [1, 2], 3, HASH_LIMIT, forced)
    wide = torch.zeros(SLOTS, 2, dtype=torch.int64)
    for arguments, index, value, message in (
        (read, 0, torch.ones(2, dtype=torch.int64), "state_index must have dtype"),
        (read, 1, Cursors(slots["base"], slots["pos"].int(), slots["pos"]), "pos must have dtype"),
        (read, 2, slots["drafts"][:, :2], "drafts must hold 3 ids a slot, got 2"),
        (read, 4, 16, "mtp_step must be 0 to 15, got 16"),
        (read, 6, END + BLOCKS * 16, "end must be 1 to 5 blocks of 16 positions"),
        (accept, 0, accept[0][:-1], "tokens must have shape"),
        (accept, 2, accept[2].int(), "outcome must have dtype"),
        (accept, 5, accept[5][:1], "table must have shape"),
        (accept, 11, torch.zeros(2, dtype=torch.int64), "hash_limit must have shape"),
        (accept, 12, forced[1:], "forced_ids must have shape"),
        (accept, 12, forced.long(), "forced_ids must have dtype"),
        (accept, 6, Cursors(wide[:, 0], *accept[6][1:]), "base must have a last dimension of stride 1"),
    ):
        changed = [*arguments[:index], value, *arguments[index + 1 :]]
        with pytest.raises(ValueError, match=message):
            (read_window if arguments is read else accept_window)(*changed)


@pytest.mark.parametrize("mtp_step", [0, 3, 15])
def test_kernels_of_lookup_in_interpreter(interpreter: None, mtp_step: int) -> None:
    for order in ORDERS[1:]:
        slots = make_slots(mtp_step, "cpu")
        window = read_window(*read_arguments(slots, order, mtp_step))
        accept = (*accept_arguments(slots, window, order, mtp_step, HASH_LIMIT), *make_lookup("cpu"))
        check_launch(accept_window, accept, rtol=0, atol=0, mutated=(6, 7, 8, 10, 11, 17))


@pytest.mark.parametrize("mtp_step", [0, 3, 4])
def test_base_stays_where_states_are_left_unfolded(interpreter: None, mtp_step: int) -> None:
    """Ten requests with 0 or 2 entries since base: with at most 5, those with 2 and a window of 4 move."""
    slots = make_slots(mtp_step, "cpu")
    before = {name: tensor.clone() for name, tensor in slots.items()}
    window = read_window(*read_arguments(slots, ORDERS[-1], mtp_step))
    accept = (*accept_arguments(slots, window, ORDERS[-1], mtp_step), None, None, 5)
    check_launch(accept_window, accept, rtol=0, atol=0, mutated=(6, 7, 8, 10, 11))
    accept_window(*accept)
    num_since = before["pos"] - before["base"]
    expected = torch.where(num_since + mtp_step + 1 <= 5, before["base"], before["pos"])
    assert torch.equal(slots["base"], expected)
    assert (slots["base"] != before["base"]).any() == (mtp_step > 2)


@pytest.mark.parametrize("mtp_step", [0, 1, 3, 7, 15])
@pytest.mark.parametrize("order", ORDERS[1:])
@pytest.mark.parametrize("hash_limit", [None, -1, HASH_LIMIT])
@pytest.mark.parametrize("is_forced", [False, True])
def test_kernels_in_interpreter(
    interpreter: None, mtp_step: int, order: list[int], hash_limit: int | None, is_forced: bool
) -> None:
    slots = make_slots(mtp_step, "cpu")
    read = read_arguments(slots, order, mtp_step)
    check_launch(read_window, read, rtol=0, atol=0)
    forced = make_forced(slots, mtp_step) if is_forced else None
    accept = accept_arguments(slots, read_window(*read), order, mtp_step, hash_limit, forced)
    check_launch(accept_window, accept, rtol=0, atol=0, mutated=(6, 7, 8, 10, 11))
