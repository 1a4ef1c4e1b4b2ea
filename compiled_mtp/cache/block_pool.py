"""Who holds which block of a paged KV cache: a free list of block ids and a count for each, on the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

Reclaim = Callable[[int], None]
"""Makes so many more blocks empty, by `BlockPool.drop`."""


class BlockPool:
    """Hands out block ids `first` to num_blocks - 1. On the device block 0 belongs to nobody.

    A block may have several holders, and may be kept for later while nobody holds it: such a block can be
    handed out too, since `allocate` has `reclaim` give kept blocks up when the empty ones are too few.

    Whoever asks has made sure that enough are free, so running out or freeing twice is a bug of ours and an
    assertion. Raises ValueError if num_blocks leaves a pool that is to hold blocks none to hand out.
    """

    def __init__(self, num_blocks: int, first: int = 1) -> None:
        if num_blocks < 2 * first:
            raise ValueError(f"num_blocks must be at least 2, got {num_blocks}; block 0 belongs to nobody")
        self.num_blocks = num_blocks
        self.reclaim: Reclaim | None = None
        self._first = first
        # A stack: the block that was freed last is the likeliest to be warm. The lowest id leaves first.
        self._empty = list(range(num_blocks - 1, first - 1, -1))
        self._holders = [0] * num_blocks
        self._kept: set[int] = set()
        self._num_idle = 0
        # How often a kept block got its first holder, or lost its last.
        self.num_turns = 0

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out: those that nobody holds."""
        return len(self._empty) + self._num_idle

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - self._first - self.num_free

    @property
    def num_empty(self) -> int:
        """Blocks that nobody holds and that are not kept."""
        return len(self._empty)

    @property
    def num_kept(self) -> int:
        """Blocks that are kept, held or not."""
        return len(self._kept)

    def is_held(self, block_id: int) -> bool:
        """Whether somebody holds the block."""
        return self._holders[block_id] > 0

    def count_sole(self, block_ids: Iterable[int]) -> int:
        """How many of these blocks have one holder."""
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
        """Give blocks that are held or kept to one holder more."""
        for block_id in block_ids:
            assert self.is_held(block_id) or block_id in self._kept, f"block {block_id} holds nothing"
            if not self.is_held(block_id):
                self._num_idle -= 1
                self.num_turns += 1
            self._holders[block_id] += 1

    def free(self, block_ids: Iterable[int]) -> None:
        """Take blocks back from one holder, in any order."""
        for block_id in block_ids:
            is_ours = self._first <= block_id < self.num_blocks
            assert is_ours, f"block {block_id} was never handed out"
            assert self.is_held(block_id), f"block {block_id} is freed twice"
            self._holders[block_id] -= 1
            if not self.is_held(block_id):
                self._leave(block_id)

    def keep(self, block_ids: Sequence[int]) -> None:
        """Keep blocks that somebody holds, until `drop`, beyond their holders."""
        assert all(map(self.is_held, block_ids)), "a block is kept that nobody holds"
        assert self._kept.isdisjoint(block_ids), "a block is kept twice"
        self._kept.update(block_ids)

    def drop(self, block_ids: Iterable[int]) -> None:
        """Keep blocks no longer; those that nobody holds are empty."""
        for block_id in block_ids:
            self._kept.remove(block_id)
            if not self.is_held(block_id):
                self._num_idle -= 1
                self._leave(block_id)

    def check_integrity(self, owned: Iterable[int]) -> None:
        """Raise AssertionError unless every block stands in `owned` once for each of its holders, and the
        others are empty or kept, and are so once.
        """
        holders = {block_id: count for block_id, count in enumerate(self._holders) if count}
        assert holders == Counter(owned), f"blocks must be held as often as they are owned, got {holders}"
        idle = {block_id for block_id in self._kept if not self.is_held(block_id)}
        everyone = sorted([*self._empty, *idle, *holders])
        wanted = list(range(self._first, self.num_blocks))
        assert everyone == wanted, f"blocks must be empty, kept or held, got {everyone}"
        assert self._num_idle == len(idle)

    def _leave(self, block_id: int) -> None:
        """Nobody holds the block any more."""
        if block_id in self._kept:
            self._num_idle += 1
            self.num_turns += 1
        else:
            self._empty.append(block_id)
