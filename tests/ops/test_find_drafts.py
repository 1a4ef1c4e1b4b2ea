"""find_drafts: the longest match and its continuation against plain Python, and what a round teaches."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from compiled_mtp.ops.find_drafts import (
    FIRST_CHAIN_KEPT,
    FIRST_THRESHOLD,
    LEAST_MATCH,
    LEAST_THRESHOLD,
    MOST_MATCH,
    MOST_THRESHOLD,
    LookupState,
    find_drafts,
)
from tests.ops.harness import check_compiles, check_equal, check_launch, check_registration

MUTATED = (4, 5, 6, 7)


def expected(ids: list[int], count: int) -> tuple[int, list[int]]:
    """The match length and the drafts of a text, by trying every earlier end."""
    best, end, last = 0, 0, len(ids) - 1
    for place in range(last):
        length = 0
        while length < MOST_MATCH and length <= place and ids[place - length] == ids[last - length] >= 0:
            length += 1
        if length >= max(best, LEAST_MATCH):
            best, end = length, place
    if not best:
        return 0, [0] * count
    text = list(ids)
    for k in range(count):
        text.append(text[end + 1 + k])
    drafts = text[len(ids) :]
    stop = next((k for k, draft in enumerate(drafts) if draft < 0), count)
    return best, drafts[:stop] + [0] * (count - stop)


def random_text(rng: random.Random, most: int) -> list[int]:
    """A text over few ids: random, with a period, or with copies of earlier parts; some ids are -1."""
    length, num_ids = rng.randint(1, most), rng.choice((2, 3, 5, 40))
    ids = [rng.randrange(num_ids) for _ in range(length)]
    if rng.random() < 0.4:
        period = rng.randint(1, 9)
        for at in range(rng.randrange(length), length):
            ids[at] = ids[at - period] if at >= period else ids[at]
    elif rng.random() < 0.6:
        count, source = rng.randint(1, 24), rng.randrange(length)
        ids += ids[source : source + count]
    if rng.random() < 0.2:
        ids[rng.randrange(len(ids))] = -1
    return ids


def arguments(
    texts: list[list[int]], seed: int, *, verify: int | None = 3, width: int = 0
) -> tuple[Any, ...]:
    """One slot for each text after the padding's, in shuffled order, with two rows of padding."""
    rng, count = random.Random(seed), len(texts)
    num_drafts = rng.choice((1, 3, 7, 15))
    slots = count + 2
    token_ids = torch.full((slots, max(width, *map(len, texts)) + 1), 1 << 20, dtype=torch.int32)
    pos = torch.zeros(slots, dtype=torch.int64)
    for slot, ids in enumerate(texts, start=1):
        token_ids[slot, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
        pos[slot] = len(ids) - 1
    order = rng.sample(range(1, count + 1), count)
    order.insert(rng.randrange(count), 0)
    order.append(0)
    draw = torch.Generator().manual_seed(seed)
    chain = torch.randint(100, 200, (len(order), min(rng.randrange(4), num_drafts)), generator=draw)
    matched = torch.randint(LEAST_MATCH, MOST_MATCH + 1, (slots,), generator=draw, dtype=torch.int32)
    matched *= torch.randint(0, 2, (slots,), generator=draw, dtype=torch.int32)
    bounds = (LEAST_THRESHOLD, MOST_THRESHOLD + 1)
    threshold = torch.randint(*bounds, (slots,), generator=draw, dtype=torch.int32)
    chain_kept = torch.randint(0, 8 * 256, (slots,), generator=draw, dtype=torch.int32)
    drafts = torch.randint(1, 99, (slots, num_drafts), generator=draw)
    matched[0] = drafts[0] = 0
    accepted = None
    if verify is not None:
        accepted = torch.zeros((len(order), 3 + verify), dtype=torch.int64)
        accepted[:, 0] = torch.randint(1, verify + 2, (len(order),), generator=draw)
    index = torch.tensor(order, dtype=torch.int32)
    lookup = LookupState(matched, threshold, chain_kept)
    return token_ids, index, pos, chain, lookup, drafts, accepted


def learnt(matched: int, threshold: int, mean: int, kept: int, verify: int) -> tuple[int, int]:
    """The threshold and the mean after a round."""
    if matched and verify:
        moved = threshold - max(256 * kept - max(min(mean, 256 * verify), 128), -512)
        return min(max(moved, LEAST_THRESHOLD), MOST_THRESHOLD), mean
    rested = threshold - 256 if threshold > 256 * MOST_MATCH else threshold
    return rested, mean + (256 * kept - mean) // 8 if verify else mean


@pytest.mark.parametrize("function", [find_drafts, find_drafts.reference], ids=["cpu", "reference"])
def test_ten_thousand_texts(function: Any) -> None:
    rng = random.Random(5)
    num_texts = num_looked_up = 0
    for seed in range(105):
        texts = [random_text(rng, 90 if seed % 4 else 12) for _ in range(100)]
        verify = (None, 0, 1, 3, 15)[seed % 5]
        args = arguments(texts, seed, verify=verify)
        _, index, _, chain, lookup, drafts, accepted = args
        before = [column.tolist() for column in lookup]
        got = function(*args)
        for row, slot in enumerate(index.tolist()):
            if not slot:
                assert got.drafts[row].tolist() == [0] * drafts.shape[1]
                assert got.matches[row].tolist() == [0, 0]
                continue
            matched, threshold, mean = (column[slot] for column in before)
            if accepted is not None:
                kept = int(accepted[row, 0]) - 1
                threshold, mean = learnt(matched, threshold, mean, kept, verify or 0)
            length, wanted = expected(texts[slot - 1], drafts.shape[1])
            if 256 * length < threshold:
                length, wanted = 0, chain[row].tolist() + [0] * (drafts.shape[1] - chain.shape[1])
            assert got.drafts[row].tolist() == drafts[slot].tolist() == wanted, (seed, slot)
            assert got.matches[row].tolist() == [matched if verify else 0, length]
            assert [int(column[slot]) for column in lookup] == [length, threshold, mean]
            num_texts, num_looked_up = num_texts + 1, num_looked_up + (length > 0)
        assert not drafts[0].any()
    assert num_texts >= 10_000
    assert num_looked_up > num_texts // 20


def test_the_padding_learns_nothing() -> None:
    args = arguments([[1, 2, 3]], 1)
    before = [int(column[0]) for column in args[4]]
    find_drafts(*args)
    assert [int(column[0]) for column in args[4]] == before


def at_the_end(extra: int) -> tuple[Any, ...]:
    """Texts of one repeated id, of which the first one's last token lies `extra` positions behind its row."""
    args = arguments([[7] * 48, [7] * 40], 3, verify=None, width=47)
    args[2][1] = 47 + extra
    args[4].threshold.fill_(LEAST_THRESHOLD)
    return args


@pytest.mark.parametrize("extra", [0, 1, 2, 40])
@pytest.mark.parametrize("function", [find_drafts, find_drafts.reference], ids=["cpu", "reference"])
def test_a_request_that_has_reached_the_end_of_its_row_matches_nothing(function: Any, extra: int) -> None:
    """Tokens past max_model_len are drawn and accepted, and never stored."""
    args = at_the_end(extra)
    found = function(*args)
    rows = {slot: row for row, slot in enumerate(args[1].tolist()) if slot}
    assert found.matches[rows[1], 1] == (0 if extra else MOST_MATCH)
    assert found.matches[rows[2], 1] == MOST_MATCH
    chain = args[3][rows[1]].tolist()
    wanted = chain + [0] * (args[5].shape[1] - len(chain)) if extra else [7] * args[5].shape[1]
    assert found.drafts[rows[1]].tolist() == wanted


@pytest.mark.parametrize("extra", [0, 1, 40])
def test_the_end_of_a_row_in_interpreter(interpreter: None, extra: int) -> None:
    check_launch(find_drafts, at_the_end(extra), rtol=0, atol=0, mutated=MUTATED)


def test_a_repeated_text_is_looked_up_sooner_and_a_wrong_match_later() -> None:
    """A request's threshold follows what its own looked-up drafts were worth beside a chain's."""
    ids = list(range(20, 40)) * 2
    token_ids = torch.tensor([[0] * 60, ids + [0] * 20], dtype=torch.int32)
    one = torch.ones(2, dtype=torch.int32)
    lookup = LookupState(0 * one, FIRST_THRESHOLD * one, FIRST_CHAIN_KEPT * one)
    rest = (torch.tensor([1], dtype=torch.int32), torch.tensor([0, 39]), torch.tensor([[7]]), lookup)
    drafts, seen = torch.zeros(2, 3, dtype=torch.int64), []
    for num_new in (1, 4, 4, 1, 4, 1):
        find_drafts(token_ids, *rest, drafts, torch.tensor([[num_new, 0, 0, 0, 0, 0]]))
        seen.append(int(lookup.threshold[1]))
    # The first round verified a chain's drafts and kept none of them: 1.75 of a chain's are kept since.
    changes = [0, -1.25, -2.5, -0.75, -2, -0.25]
    assert seen == [FIRST_THRESHOLD + 256 * change for change in changes]
    assert drafts[1].tolist() == [20, 21, 22]


def test_a_request_whose_longest_matches_are_wrong_leaves_them_to_its_chain_for_a_while() -> None:
    ids = list(range(20, 40)) * 2
    token_ids = torch.tensor([[0] * 60, ids + [0] * 20], dtype=torch.int32)
    one = torch.ones(2, dtype=torch.int32)
    lookup = LookupState(0 * one, FIRST_THRESHOLD * one, 3 * 256 * one)
    rest = (torch.tensor([1], dtype=torch.int32), torch.tensor([0, 39]), torch.tensor([[7]]), lookup)
    drafts, matches = torch.zeros(2, 3, dtype=torch.int64), []
    for _ in range(24):
        # Looked-up drafts keep none, the chain's all.
        num_new = 1 if int(lookup.matched[1]) else 4
        found = find_drafts(token_ids, *rest, drafts, torch.tensor([[num_new, 0, 0, 0, 0, 0]]))
        matches.append(int(found.matches[0, 1]))
    # After five misses the threshold is 18. Two rounds of the chain lower it to 16, the next miss raises it.
    assert matches == [*[16] * 5, *[0, 0, 16] * 6, 0]


@pytest.mark.parametrize("verify", [None, 0, 3, 15])
@pytest.mark.parametrize("lengths", [(1, 2, 20), (700, 1024, 1025), (3000, 5, 2100)])
def test_kernels_in_interpreter(interpreter: None, lengths: tuple[int, ...], verify: int | None) -> None:
    rng = random.Random(sum(lengths))
    texts = []
    for length in lengths:
        ids = [rng.randrange(50) for _ in range(length)]
        begin = rng.randrange(max(length // 2, 1))
        texts.append([*ids, *ids[begin : begin + rng.choice((4, 9, 30))]])
    args = arguments(texts, len(lengths), verify=verify)
    check_launch(find_drafts, args, rtol=0, atol=0, mutated=MUTATED)


def test_parts_of_a_text_change_no_result(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton exists on Linux only")
    from compiled_mtp.ops.find_drafts import kernel

    ids = [position * 7919 % 97 for position in range(4200)]
    for most in (1, 3, 64):
        monkeypatch.setattr(kernel, "MOST_PROGRAMS", most)
        args = arguments([ids, ids[:50]], 3)
        check_launch(find_drafts, args, rtol=0, atol=0, mutated=MUTATED)


def test_the_cpu_computes_the_specification() -> None:
    rng = random.Random(3)
    args = arguments([random_text(rng, 400) for _ in range(40)], 8)
    check_equal(find_drafts, find_drafts.reference, args, rtol=0, atol=0, mutated=MUTATED)


def test_registration_and_compilation() -> None:
    args = arguments([[1, 2, 3] * 9, [4, 5]], 2)
    check_registration(torch.ops.compiled_mtp.find_drafts.default, (*args, False))
    check_compiles(find_drafts, [args, arguments([[1, 2] * 9], 2, verify=None)])


def test_bad_arguments_raise() -> None:
    args = list(arguments([[1, 2, 3]], 4))
    for index, value, message in (
        (0, args[0].long(), "token_ids must have dtype"),
        (1, args[1].long(), "state_index must have dtype"),
        (3, torch.zeros(len(args[1]), 16, dtype=torch.int64), "drafts must hold 16 ids a slot"),
        (4, args[4]._replace(threshold=args[4].threshold[1:]), "threshold must have shape"),
        (6, args[6][1:], "accepted must have shape"),
    ):
        with pytest.raises(ValueError, match=message):
            find_drafts(*args[:index], value, *args[index + 1 :])
