"""The host tier of the prefix cache: which entries it evicts first, keeps, and finds."""

from __future__ import annotations

from compiled_mtp.cache.prefix_host_tier import PrefixHostTier

KEYS = [b"%d" % number for number in range(9)]


def complete_evictions(prefix_host: PrefixHostTier) -> list[int]:
    """Plan and complete every copy; return the records and blocks that the copies filled."""
    filled, evictions = [], prefix_host.take_evictions()
    for copy_id, eviction in enumerate(evictions):
        prefix_host.begin(eviction, copy_id)
        filled += [] if eviction.record is None else [eviction.record]
        filled += sorted(block for _, block in eviction.blocks)
    prefix_host.finish_copies(range(len(evictions)))
    return filled


def test_a_state_is_found_when_its_copy_is_complete() -> None:
    prefix_host = PrefixHostTier(2, 4)
    prefix_host.eviction(KEYS[0], 1, 5, (7, 10), [30, 31])
    assert not prefix_host.has_state(KEYS[0])
    (eviction,) = prefix_host.take_evictions()
    assert (eviction.snapshot, [block for block, _ in eviction.blocks]) == (7, [30, 31])
    prefix_host.begin(eviction, 3)
    prefix_host.finish_copies([2])
    assert not prefix_host.has_state(KEYS[0])
    prefix_host.finish_copies([3])
    assert prefix_host.has_state(KEYS[0])
    assert prefix_host.has_blocks(KEYS[0])
    # An entry that is there is not copied again.
    prefix_host.eviction(KEYS[0], 1, 6, (8, 11), [40, 41])
    assert prefix_host.take_evictions() == []


def test_a_lost_copy_leaves_no_entry_and_no_memory_in_use() -> None:
    prefix_host = PrefixHostTier(1, 2)
    prefix_host.eviction(KEYS[0], 1, 5, (7, 10), [30, 31])
    (eviction,) = prefix_host.take_evictions()
    prefix_host.begin(eviction, 3)
    prefix_host.drop_copies([3])
    prefix_host.finish_copies([3])
    assert not prefix_host.has_state(KEYS[0])
    assert (prefix_host.num_records_used, prefix_host.num_blocks_used) == (0, 0)
    prefix_host.check_integrity([])


def test_snapshots_worth_least_are_evicted_for_those_worth_more() -> None:
    prefix_host = PrefixHostTier(2, 0)
    for key, worth in ((0, 20), (1, 10), (2, 5), (3, 30)):
        prefix_host.eviction(KEYS[key], 1, 0, (0, worth))
        complete_evictions(prefix_host)
    assert [prefix_host.has_state(key) for key in KEYS[:4]] == [True, False, False, True]


def test_the_ends_of_prompts_are_evicted_before_their_beginnings() -> None:
    prefix_host = PrefixHostTier(0, 6)
    for number in (1, 2, 3):
        prefix_host.eviction(KEYS[number], number, 5, block_ids=[number, number + 10])
    complete_evictions(prefix_host)
    prefix_host.eviction(KEYS[5], 1, 6, block_ids=[4, 14])
    complete_evictions(prefix_host)
    assert [prefix_host.has_blocks(KEYS[n]) for n in (1, 2, 3, 5)] == [True, True, False, True]


def test_an_entry_held_for_a_prompt_stays() -> None:
    prefix_host = PrefixHostTier(1, 0)
    prefix_host.eviction(KEYS[0], 1, 0, (0, 1))
    complete_evictions(prefix_host)
    item = prefix_host.hold(KEYS[0], 1, 1, 0, is_state=True)
    prefix_host.eviction(KEYS[1], 1, 0, (0, 99))
    assert complete_evictions(prefix_host) == []
    prefix_host.check_integrity([item])
    prefix_host.release([item])
    prefix_host.eviction(KEYS[1], 1, 0, (0, 99))
    assert complete_evictions(prefix_host) == [0]
    assert not prefix_host.has_state(KEYS[0])


def test_a_host_tier_that_gets_no_memory_keeps_its_entries() -> None:
    prefix_host = PrefixHostTier(3, 6)
    prefix_host.eviction(KEYS[0], 1, 0, (0, 1), [1, 2])
    complete_evictions(prefix_host)
    prefix_host.eviction(KEYS[1], 1, 0, (0, 5), [3, 4])
    (eviction,) = prefix_host.take_evictions()
    prefix_host.begin(eviction, 9)
    prefix_host.cancel_copies([9, 10])
    prefix_host.check_integrity([])
    assert prefix_host.has_state(KEYS[0])
    # The entry replaces the one that is there: no other memory is left.
    prefix_host.eviction(KEYS[1], 1, 1, (0, 5), [3, 4])
    assert complete_evictions(prefix_host) == [0, 0, 1]
    prefix_host.check_integrity([])
