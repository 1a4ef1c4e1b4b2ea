"""The host tier of the prefix cache: what is evicted first, what stays, and when an entry is found."""

from __future__ import annotations

from compiled_mtp.cache.prefix_host_tier import PrefixHostTier

KEYS = [b"%d" % number for number in range(9)]


def bring(prefix_host: PrefixHostTier) -> list[int]:
    """Plan and complete every copy; return the records and blocks that they filled."""
    rows, evictions = [], prefix_host.take_evictions()
    for copy_id, eviction in enumerate(evictions):
        prefix_host.begin(eviction, copy_id)
        rows += [] if eviction.record is None else [eviction.record]
        rows += sorted(block for _, block in eviction.blocks)
    prefix_host.finish_copies(range(len(evictions)))
    return rows


def test_a_state_is_found_when_its_copy_is_complete() -> None:
    prefix_host = PrefixHostTier(2, 4)
    prefix_host.evict_to_host(KEYS[0], 1, 5, (7, 10), [30, 31])
    assert not prefix_host.has_state(KEYS[0])
    (eviction,) = prefix_host.take_evictions()
    assert (eviction.snapshot, [block for block, _ in eviction.blocks]) == (7, [30, 31])
    prefix_host.begin(eviction, 3)
    prefix_host.finish_copies([2])
    assert not prefix_host.has_state(KEYS[0])
    prefix_host.finish_copies([3])
    assert prefix_host.has_state(KEYS[0])
    assert prefix_host.has_blocks(KEYS[0])
    # The tier already holds it, so it is not copied again.
    prefix_host.evict_to_host(KEYS[0], 1, 6, (8, 11), [40, 41])
    assert prefix_host.take_evictions() == []


def test_a_lost_copy_leaves_no_entry() -> None:
    prefix_host = PrefixHostTier(1, 2)
    prefix_host.evict_to_host(KEYS[0], 1, 5, (7, 10), [30, 31])
    (eviction,) = prefix_host.take_evictions()
    prefix_host.begin(eviction, 3)
    prefix_host.drop_copies([3])
    prefix_host.finish_copies([3])
    assert not prefix_host.has_state(KEYS[0])
    assert (prefix_host.num_records_used, prefix_host.num_blocks_used) == (0, 0)
    prefix_host.check_integrity([])


def test_states_that_expire_first_are_evicted_first_and_only_for_later_ones() -> None:
    prefix_host = PrefixHostTier(2, 0)
    for key, expiry in ((0, 20), (1, 10), (2, 5), (3, 30)):
        prefix_host.evict_to_host(KEYS[key], 1, 0, (0, expiry))
        bring(prefix_host)
    assert [prefix_host.has_state(key) for key in KEYS[:4]] == [True, False, False, True]


def test_last_chunks_are_evicted_before_the_chunks_before_them() -> None:
    prefix_host = PrefixHostTier(0, 6)
    for number in (1, 2, 3):
        prefix_host.evict_to_host(KEYS[number], number, 5, block_ids=[number, number + 10])
    bring(prefix_host)
    prefix_host.evict_to_host(KEYS[5], 1, 6, block_ids=[4, 14])
    bring(prefix_host)
    assert [prefix_host.has_blocks(KEYS[n]) for n in (1, 2, 3, 5)] == [True, True, False, True]


def test_an_entry_with_a_reader_stays() -> None:
    prefix_host = PrefixHostTier(1, 0)
    prefix_host.evict_to_host(KEYS[0], 1, 0, (0, 1))
    bring(prefix_host)
    entry = prefix_host.hold(KEYS[0], 1, 1, 0, is_state=True)
    prefix_host.evict_to_host(KEYS[1], 1, 0, (0, 99))
    assert bring(prefix_host) == []
    prefix_host.check_integrity([entry])
    prefix_host.release([entry])
    prefix_host.evict_to_host(KEYS[1], 1, 0, (0, 99))
    assert bring(prefix_host) == [0]
    assert not prefix_host.has_state(KEYS[0])


def test_a_tier_without_memory_keeps_its_entries() -> None:
    prefix_host = PrefixHostTier(3, 6)
    prefix_host.evict_to_host(KEYS[0], 1, 0, (0, 1), [1, 2])
    bring(prefix_host)
    prefix_host.evict_to_host(KEYS[1], 1, 0, (0, 5), [3, 4])
    (eviction,) = prefix_host.take_evictions()
    prefix_host.begin(eviction, 9)
    prefix_host.cancel_copies([9, 10])
    prefix_host.check_integrity([])
    assert prefix_host.has_state(KEYS[0])
    # It replaces the entry that is there, since the tier has no other memory.
    prefix_host.evict_to_host(KEYS[1], 1, 1, (0, 5), [3, 4])
    assert bring(prefix_host) == [0, 0, 1]
    prefix_host.check_integrity([])


def test_what_a_request_reads_is_evicted_later() -> None:
    prefix_host = PrefixHostTier(2, 2)
    for key, priority in ((0, 10), (1, 12)):
        prefix_host.evict_to_host(KEYS[key], 1, priority, (0, priority), [30 + key])
        bring(prefix_host)
    read = [prefix_host.hold(KEYS[0], 1, 20, 20, is_state=is_state) for is_state in (True, False)]
    prefix_host.release(read)
    prefix_host.evict_to_host(KEYS[2], 1, 15, (0, 15), [32])
    bring(prefix_host)
    assert [prefix_host.has_state(key) for key in KEYS[:3]] == [True, False, True]
    assert [prefix_host.has_blocks(key) for key in KEYS[:3]] == [True, False, True]
