"""Blocks are handed out once and taken back once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiled_mtp.cache.block_pool import BlockPool


@given(st.integers(2, 20), st.data())
def test_every_block_is_owned_by_one(num_blocks: int, data: st.DataObject) -> None:
    pool, owned = BlockPool(num_blocks), []
    for _ in range(data.draw(st.integers(0, 12))):
        if owned and data.draw(st.booleans()):
            count = data.draw(st.integers(1, len(owned)))
            pool.free(owned[:count])
            owned = owned[count:]
        else:
            owned += pool.allocate(data.draw(st.integers(0, pool.num_free)))
        assert len(set(owned)) == len(owned)
        assert all(0 < block_id < num_blocks for block_id in owned)
        assert pool.num_used == len(owned)
        assert pool.num_free == num_blocks - 1 - len(owned)


def test_a_misuse_is_an_assertion() -> None:
    pool = BlockPool(4)
    (first, *_) = pool.allocate(3)
    with pytest.raises(AssertionError, match="1 blocks asked for, 0 are free"):
        pool.allocate(1)
    pool.free([first])
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free([first])
    for block_id in (0, 4):
        with pytest.raises(AssertionError, match="never handed out"):
            pool.free([block_id])


def test_a_pool_needs_a_block() -> None:
    with pytest.raises(ValueError, match="num_blocks must be at least 2, got 1"):
        BlockPool(1)


def test_a_block_is_free_when_its_last_holder_has_left() -> None:
    pool = BlockPool(6)
    blocks = pool.allocate(3)
    pool.share(blocks[:2])
    pool.check_integrity([*blocks, *blocks[:2]])
    pool.free(blocks)
    assert (pool.num_used, pool.num_free) == (2, 3)
    with pytest.raises(AssertionError, match="as often as they are owned"):
        pool.check_integrity([blocks[0]])
    pool.free(blocks[:2])
    assert (pool.num_used, pool.num_free, pool.num_empty) == (0, 5, 5)


def test_kept_blocks_are_dropped_when_they_are_handed_out() -> None:
    pool, asked = BlockPool(5), []
    blocks = pool.allocate(4)
    pool.keep(blocks)
    pool.free(blocks)
    assert (pool.num_used, pool.num_free, pool.num_empty, pool.num_kept) == (0, 4, 0, 4)
    pool.share(blocks[:1])

    def reclaim(count: int) -> None:
        asked.append(count)
        pool.drop(blocks)

    pool.reclaim = reclaim
    new = pool.allocate(2)
    assert asked == [2]
    assert set(new) < set(blocks[1:])
    pool.check_integrity([*new, blocks[0]])
    pool.free(new)
    with pytest.raises(AssertionError, match="a block is kept that has no holder"):
        pool.keep(new)
    with pytest.raises(AssertionError, match=f"block {new[0]} is neither held nor kept"):
        pool.share(new)
