"""The index of the prefix cache: what changes the blocks that a prompt may share."""

from __future__ import annotations

from compiled_mtp.cache.block_pool import BlockPool
from compiled_mtp.cache.prefix_host_tier import PrefixHostTier
from compiled_mtp.cache.prefix_index import Chunk, PrefixIndex


def test_a_chunk_that_gains_a_snapshot_can_be_shared() -> None:
    pool, index = BlockPool(10), PrefixIndex(4, 1, PrefixHostTier(0, 0))
    index.reset(pool)
    keys, block_ids = [b"1", b"2"], pool.allocate(2)

    def enter(number: int) -> None:
        chunk = Chunk(keys[number - 1], number)
        assert index.assign_snapshot(chunk)
        index.enter(keys[:number], block_ids, [chunk], number)

    enter(2)
    version = index.version
    assert [index.count_shared(keys[:count]) for count in (1, 2)] == [0, 2]
    enter(1)
    assert index.count_shared(keys[:1]) == 1
    # Counts that callers keep are those of a version.
    assert index.version != version
    index.check_integrity([])
