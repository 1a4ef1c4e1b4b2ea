"""Who owns which block of the paged KV cache: a free list of block ids, on the host."""

from __future__ import annotations

from collections.abc import Iterable


class BlockPool:
    """Hands out block ids 1 to num_blocks - 1; block 0 belongs to nobody.

    The scheduler admits a request only if its worst case fits, so running out or freeing twice is a bug of
    ours and an assertion. Raises ValueError if num_blocks leaves no block to hand out.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks must be at least 2, got {num_blocks}; block 0 belongs to nobody")
        self.num_blocks = num_blocks
        # A stack: the block that was freed last is the likeliest to be warm. The lowest id leaves first.
        self._free = list(range(num_blocks - 1, 0, -1))
        self._is_free = [False] + [True] * (num_blocks - 1)

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that somebody owns."""
        return self.num_blocks - 1 - len(self._free)

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
            assert 0 < block_id < self.num_blocks, f"block {block_id} was never handed out"
            assert not self._is_free[block_id], f"block {block_id} is freed twice"
            self._is_free[block_id] = True
            self._free.append(block_id)
