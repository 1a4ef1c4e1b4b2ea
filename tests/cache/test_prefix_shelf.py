"""What the prefix cache keeps in host memory: who goes first, who stays, and when something is found."""

from __future__ import annotations

from compiled_mtp.cache.prefix_shelf import PrefixShelf

KEYS = [b"%d" % number for number in range(9)]


def bring(shelf: PrefixShelf) -> list[int]:
    """Plan and complete every copy; the records and blocks that they went to."""
    places, spills = [], shelf.take_spills()
    for copy_id, spill in enumerate(spills):
        shelf.begin(spill, copy_id)
        places += [] if spill.record is None else [spill.record]
        places += sorted(block for _, block in spill.blocks)
    shelf.finish_copies(range(len(spills)))
    return places


def test_a_state_is_found_when_its_copy_is_complete() -> None:
    shelf = PrefixShelf(2, 4)
    shelf.spill(KEYS[0], 1, 5, (7, 10), [30, 31])
    assert not shelf.has_state(KEYS[0])
    (spill,) = shelf.take_spills()
    assert (spill.checkpoint, [block for block, _ in spill.blocks]) == (7, [30, 31])
    shelf.begin(spill, 3)
    shelf.finish_copies([2])
    assert not shelf.has_state(KEYS[0])
    shelf.finish_copies([3])
    assert shelf.has_state(KEYS[0])
    assert shelf.has_blocks(KEYS[0])
    # What is there is not brought again.
    shelf.spill(KEYS[0], 1, 6, (8, 11), [40, 41])
    assert shelf.take_spills() == []


def test_a_copy_that_is_lost_brings_nothing_and_takes_nothing() -> None:
    shelf = PrefixShelf(1, 2)
    shelf.spill(KEYS[0], 1, 5, (7, 10), [30, 31])
    (spill,) = shelf.take_spills()
    shelf.begin(spill, 3)
    shelf.drop_copies([3])
    shelf.finish_copies([3])
    assert not shelf.has_state(KEYS[0])
    assert (shelf.num_records_used, shelf.num_blocks_used) == (0, 0)
    shelf.check_integrity([])


def test_states_that_are_worth_least_go_first_and_only_for_those_worth_more() -> None:
    shelf = PrefixShelf(2, 0)
    for key, worth in ((0, 20), (1, 10), (2, 5), (3, 30)):
        shelf.spill(KEYS[key], 1, 0, (0, worth))
        bring(shelf)
    assert [shelf.has_state(key) for key in KEYS[:4]] == [True, False, False, True]


def test_the_ends_of_prompts_go_before_what_they_stand_on() -> None:
    shelf = PrefixShelf(0, 6)
    for number in (1, 2, 3):
        shelf.spill(KEYS[number], number, 5, block_ids=[number, number + 10])
    bring(shelf)
    shelf.spill(KEYS[5], 1, 6, block_ids=[4, 14])
    bring(shelf)
    assert [shelf.has_blocks(KEYS[n]) for n in (1, 2, 3, 5)] == [True, True, False, True]


def test_what_somebody_is_going_to_be_given_stays() -> None:
    shelf = PrefixShelf(1, 0)
    shelf.spill(KEYS[0], 1, 0, (0, 1))
    bring(shelf)
    item = shelf.hold(KEYS[0], 1, 1, 0, is_state=True)
    shelf.spill(KEYS[1], 1, 0, (0, 99))
    assert bring(shelf) == []
    shelf.check_integrity([item])
    shelf.release([item])
    shelf.spill(KEYS[1], 1, 0, (0, 99))
    assert bring(shelf) == [0]
    assert not shelf.has_state(KEYS[0])


def test_a_shelf_that_gets_no_memory_keeps_what_it_has() -> None:
    shelf = PrefixShelf(3, 6)
    shelf.spill(KEYS[0], 1, 0, (0, 1), [1, 2])
    bring(shelf)
    shelf.spill(KEYS[1], 1, 0, (0, 5), [3, 4])
    (spill,) = shelf.take_spills()
    shelf.begin(spill, 9)
    shelf.cancel_copies([9, 10])
    shelf.check_integrity([])
    assert shelf.has_state(KEYS[0])
    # It takes the place of what is there: nothing else can be had.
    shelf.spill(KEYS[1], 1, 1, (0, 5), [3, 4])
    assert bring(shelf) == [0, 0, 1]
    shelf.check_integrity([])
