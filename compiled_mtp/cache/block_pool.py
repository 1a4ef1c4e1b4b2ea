"""Counts the holders of each block of a paged KV cache, on the host, and keeps a free list of block ids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

Reclaim = Callable[[int], None]
"""Makes at least the given number of blocks empty, by `BlockPool.drop`."""


class BlockPool:
    """Hands out block ids `first` to num_blocks - 1. On the device no request uses block 0.

    A block may have several holders. It may also be kept, with or without holders: a kept block without
    holders counts as free, because `allocate` calls `reclaim` to drop kept blocks when too few are empty.

    Callers check `num_free` first, so running out and freeing twice are assertions. Raises ValueError if
    num_blocks leaves none to hand out.
    """

    def __init__(self, num_blocks: int, first: int = 1) -> None:
        if num_blocks < 2 * first:
            raise ValueError(f"num_blocks must be at least 2, got {num_blocks}; no request uses block 0")
        self.num_blocks = num_blocks
        self.reclaim: Reclaim | None = None
        self._first = first
        # A stack: the block that was freed last is the likeliest to be in a cache. The lowest id comes first.
        self._empty = list(range(num_blocks - 1, first - 1, -1))
        self._holders = [0] * num_blocks
        self._kept: set[int] = set()
        self._num_idle = 0
        # How often a kept block got its first holder or lost its last.
        self.num_turns = 0

    @property
    def num_free(self) -> int:
        """Blocks without a holder, which can be handed out."""
        return len(self._empty) + self._num_idle

    @property
    def num_used(self) -> int:
        """Blocks with a holder."""
        return self.num_blocks - self._first - self.num_free

    @property
    def num_empty(self) -> int:
        """Blocks without a holder that are not kept."""
        return len(self._empty)

    @property
    def num_kept(self) -> int:
        """Blocks that are kept, held or not."""
        return len(self._kept)

    def is_held(self, block_id: int) -> bool:
        """Return whether the block has a holder."""
        return self._holders[block_id] > 0

    def count_sole(self, block_ids: Iterable[int]) -> int:
        """Return how many of these blocks have exactly one holder."""
        return sum(self._holders[block_id] == 1 for block_id in block_ids)

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` blocks, each to one holder."""
        assert 0 <= count <= self.num_free, f"{count} blocks asked for, {self.num_free} are free"
        missing = count - len(self._empty)
        if missing > 0 and self.reclaim is not None:
            self.reclaim(missing)
        block_ids = [self._empty.pop() for _ in range(count)]
        for block_id in block_ids:
            self._holders[block_id] = 1
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Add a holder to blocks that are held or kept."""
        for block_id in block_ids:
            assert self.is_held(block_id) or block_id in self._kept, (
                f"block {block_id} is neither held nor kept"
            )
            if not self.is_held(block_id):
                self._num_idle -= 1
                self.num_turns += 1
            self._holders[block_id] += 1

    def free(self, block_ids: Iterable[int]) -> None:
        """Remove a holder from each block, in any order."""
        for block_id in block_ids:
            is_ours = self._first <= block_id < self.num_blocks
            assert is_ours, f"block {block_id} was never handed out"
            assert self.is_held(block_id), f"block {block_id} is freed twice"
            self._holders[block_id] -= 1
            if not self.is_held(block_id):
                self._leave(block_id)

    def keep(self, block_ids: Sequence[int]) -> None:
        """Keep held blocks until `drop`, even after their last holder has left."""
        assert all(map(self.is_held, block_ids)), "a block is kept that has no holder"
        assert self._kept.isdisjoint(block_ids), "a block is kept twice"
        self._kept.update(block_ids)

    def drop(self, block_ids: Iterable[int]) -> None:
        """Stop keeping blocks; those without a holder become empty."""
        for block_id in block_ids:
            self._kept.remove(block_id)
            if not self.is_held(block_id):
                self._num_idle -= 1
                self._leave(block_id)

    def check_integrity(self, owned: Iterable[int]) -> None:
        """Raise AssertionError unless `owned` has every block once for each holder, and each other block is
        either empty or kept.
        """
        holders = {block_id: count for block_id, count in enumerate(self._holders) if count}
        assert holders == Counter(owned), f"blocks must be held as often as they are owned, got {holders}"
        idle = {block_id for block_id in self._kept if not self.is_held(block_id)}
        known = sorted([*self._empty, *idle, *holders])
        wanted = list(range(self._first, self.num_blocks))
        assert known == wanted, f"blocks must be empty, kept or held, got {known}"
        assert self._num_idle == len(idle)

    def _leave(self, block_id: int) -> None:
        """Count a block that has lost its last holder as idle if it is kept, else as empty."""
        if block_id in self._kept:
            self._num_idle += 1
            self.num_turns += 1
        else:
            self._empty.append(block_id)
