"""Who owns which block of a paged KV cache: a free list of block ids, on the host."""

from __future__ import annotations

from collections.abc import Iterable


class BlockPool:
    """Hands out block ids `first` to num_blocks - 1. On the device block 0 belongs to nobody.

    Whoever asks has made sure that enough are free, so running out or freeing twice is a bug of ours and an
    assertion. Raises ValueError if num_blocks leaves a pool that is to hold blocks none to hand out.
    """

    def __init__(self, num_blocks: int, first: int = 1) -> None:
        if num_blocks < 2 * first:
            raise ValueError(f"num_blocks must be at least 2, got {num_blocks}; block 0 belongs to nobody")
        self.num_blocks = num_blocks
        self._first = first
        # A stack: the block that was freed last is the likeliest to be warm. The lowest id leaves first.
        self._free = list(range(num_blocks - 1, first - 1, -1))
        self._is_free = [block_id >= first for block_id in range(num_blocks)]

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that somebody owns."""
        return self.num_blocks - self._first - len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` blocks."""
        assert 0 <= count <= len(self._free), f"{count} blocks asked for, {len(self._free)} are free"
        block_ids = [self._free.pop() for _ in range(count)]
        for block_id in block_ids:
            self._is_free[block_id] = False
        return block_ids

    def free(self, block_ids: Iterable[int]) -> None:
        """Take blocks back, in any order."""
        for block_id in block_ids:
            is_ours = self._first <= block_id < self.num_blocks
            assert is_ours, f"block {block_id} was never handed out"
            assert not self._is_free[block_id], f"block {block_id} is freed twice"
            self._is_free[block_id] = True
            self._free.append(block_id)

    def check_integrity(self, owned: Iterable[int]) -> None:
        """Raise AssertionError unless every block is free or stands in `owned`, and is so once."""
        everyone = sorted([*self._free, *owned])
        wanted = list(range(self._first, self.num_blocks))
        assert everyone == wanted, f"blocks must be free or owned once, got {everyone}"
        assert all(self._is_free[block_id] for block_id in self._free), "a free block counts as owned"
        assert sum(self._is_free) == len(self._free), "an owned block counts as free"
