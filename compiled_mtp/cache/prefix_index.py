"""Which prompts have left what behind: blocks that hold whole chunks, checkpoints at their ends. No torch."""

from __future__ import annotations

import hashlib
import heapq
import itertools
from array import array
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from compiled_mtp.cache.block_pool import BlockPool
from compiled_mtp.cache.prefix_host_tier import PrefixHostTier

LONGEST_LIFE = 64
"""Prompts for which an end or a branching point is kept, unless a prompt takes it up again."""


def root_key(salt: str | None) -> bytes:
    """What the keys of prompts with this salt begin from; no salt is another one than an empty one."""
    return _digest(b"" if salt is None else b"salt" + salt.encode())


def chain_key(before: bytes, token_ids: Sequence[int]) -> bytes:
    """The key of a chunk behind the one whose key is `before`: of its own tokens and all before them."""
    return _digest(before + array("q", token_ids).tobytes())


def _digest(content: bytes) -> bytes:
    # Long enough that nobody makes two prompts of one key.
    return hashlib.blake2b(content, digest_size=32).digest()


@dataclass(slots=True, eq=False)
class Chunk:
    """A chunk of a prompt with all that stands before it, which its key names; the first has number 1.

    checkpoint: where the state at its end lies, None if it was not kept. last_use counts prompts.
    is_resume_point: its end is where the last prompt that came by resumed, or would if it came again. It is
    entered once it can be found.
    """

    key: bytes
    number: int
    is_resume_point: bool = False
    snapshot: int | None = None
    last_use: int = 0
    parent: Chunk | None = None
    block_ids: tuple[int, ...] = ()
    num_children: int = 0
    is_entered: bool = False

    @property
    def life(self) -> int:
        """Prompts for which its checkpoint is worth keeping: of the chunks on the way to an end, every 2^k-th
        lives 2^k prompts, so that a long prompt gives up its own before those of others.
        """
        is_way = self.num_children == 1 or not self.is_entered
        return (
            min(self.number & -self.number, LONGEST_LIFE)
            if is_way and not self.is_resume_point
            else LONGEST_LIFE
        )


class PrefixIndex:
    """The one owner of cached blocks and checkpoints: a tree of chunks over the blocks of a pool.

    Every chunk has its blocks, every leaf a checkpoint, so that each of them serves some hit. A chunk's
    blocks are kept in the pool; requests share them. What is to be given up is what was of use the longest
    time ago: for blocks the leaves, those that no request holds first; for checkpoints `Chunk.life` counts
    too. A place of a checkpoint may be taken from a chunk that is not entered yet, which then has none.
    num_evictions counts checkpoints given up for others, or with their blocks. What is given up goes to
    `prefix_host`.
    """

    def __init__(self, num_snapshots: int, blocks_per_chunk: int, prefix_host: PrefixHostTier) -> None:
        self.num_snapshots = num_snapshots
        self.blocks_per_chunk = blocks_per_chunk
        self.prefix_host = prefix_host
        self.num_evictions = 0
        self.clock = 0
        # How often what can be found has changed.
        self._num_changes = 0

    def reset(self, pool: BlockPool) -> None:
        """Forget everything; from here on over the blocks of `pool`, of which none is kept."""
        self._pool = pool
        pool.reclaim = self.reclaim
        self._num_changes += 1
        self._chunks: dict[bytes, Chunk] = {}
        # In the order in which they became leaves: there are never more of them than checkpoints.
        self._leaves: dict[Chunk, None] = {}
        # Who has which checkpoint, entered or not.
        self._holders: dict[int, Chunk] = {}
        self._free_places = list(range(self.num_snapshots - 1, -1, -1))

    @property
    def num_checkpoints_used(self) -> int:
        """Checkpoints that somebody has."""
        return len(self._holders)

    @property
    def version(self) -> tuple[int, int]:
        """Another one whenever `count_shared` may have another answer."""
        return self._num_changes, self._pool.num_turns

    def find(self, key: bytes) -> Chunk | None:
        """The chunk of this key, if it is entered."""
        return self._chunks.get(key)

    def match(self, keys: Sequence[bytes]) -> list[Chunk]:
        """The longest row of chunks that a prompt of these keys begins with; a new prompt has come."""
        self.clock += 1
        known: list[Chunk] = []
        for key in keys:
            chunk = self._chunks.get(key)
            if chunk is None:
                break
            known.append(chunk)
        return known

    def count_shared(self, keys: Sequence[bytes]) -> int:
        """Blocks, held by requests, of the row of chunks that a prompt of these keys would resume behind."""
        count = held = 0
        for key in keys:
            chunk = self._chunks.get(key)
            if chunk is None:
                break
            count += sum(map(self._pool.is_held, chunk.block_ids))
            held = count if chunk.snapshot is not None else held
        return held

    def use(self, chunks: Sequence[Chunk]) -> list[int]:
        """Share the blocks of a row of chunks, behind which a prompt resumes; return them in their order."""
        block_ids = [block_id for chunk in chunks for block_id in chunk.block_ids]
        self._pool.share(block_ids)
        for chunk in chunks:
            chunk.last_use = self.clock
        return block_ids

    def take_place(self, chunk: Chunk) -> bool:
        """Give a chunk that is not entered a checkpoint, if there is one that is worth less."""
        chunk.last_use = self.clock
        if not self._free_places:
            worst = min(self._holders.values(), key=_worth, default=None)
            if worst is None or _worth(worst) >= _worth(chunk):
                return False
            self.num_evictions += 1
            self._give_up(worst)
        chunk.snapshot = self._free_places.pop()
        self._holders[chunk.snapshot] = chunk
        return True

    def enter(
        self, keys: Sequence[bytes], block_ids: Sequence[int], chunks: Collection[Chunk], resume_end: int
    ) -> None:
        """Let the chunks of a prompt be found from now on: `chunks` are those for which a place was taken.

        keys are those of all its chunks, block_ids begin with their blocks, which whoever brings them holds.
        It would resume behind chunk number `resume_end`. Of two equal chunks the first stays, and takes a
        checkpoint that it lacks.
        """
        fresh = {chunk.number: chunk for chunk in chunks if chunk.snapshot is not None}
        parent = None
        for number, key in enumerate(keys[: max(fresh, default=0)], start=1):
            brought = fresh.get(number)
            chunk = self._chunks.get(key)
            if chunk is None:
                chunk = Chunk(key, number) if brought is None else brought
                end = number * self.blocks_per_chunk
                self._insert(chunk, parent, tuple(block_ids[end - self.blocks_per_chunk : end]))
            elif brought is not None:
                self._merge(chunk, brought)
            chunk.last_use = self.clock
            chunk.is_resume_point = number == resume_end
            parent = chunk

    def forget(self, chunks: Collection[Chunk]) -> None:
        """Take the checkpoints of chunks that will not be entered back."""
        for chunk in chunks:
            self._free_place(chunk)

    def reclaim(self, count: int) -> None:
        """Give up chunks, leaves first and of these the one that was used longest ago, until `count` more
        blocks of the pool are empty.
        """
        wanted = self._pool.num_empty + count
        order = itertools.count()
        leaves = [self._turn(leaf, order) for leaf in self._leaves]
        heapq.heapify(leaves)
        while self._pool.num_empty < wanted:
            leaf = heapq.heappop(leaves)[-1]
            self.num_evictions += 1
            self._give_up(leaf)
            above = leaf.parent
            while above is not None and not above.is_entered:
                above = above.parent
            if above is not None and not above.num_children:
                heapq.heappush(leaves, self._turn(above, order))

    def _turn(self, leaf: Chunk, order: Iterator[int]) -> tuple[bool, int, int, Chunk]:
        """When a leaf goes. One that a request holds gives no block: it goes when idle ones lie above such
        alone.
        """
        return self._pool.is_held(leaf.block_ids[0]), leaf.last_use, next(order), leaf

    def check_integrity(self, pending: Collection[Chunk]) -> None:
        """Raise AssertionError unless every checkpoint is free or had once, by a chunk that is entered or
        one of `pending`, every chunk has a parent and blocks of its own, and no leaf lacks a checkpoint.
        """
        places = sorted([*self._free_places, *self._holders])
        assert places == list(range(self.num_snapshots)), f"checkpoints must be free or had once: {places}"
        assert all(chunk.snapshot == place for place, chunk in self._holders.items())
        holders = {id(c) for c in (*self._chunks.values(), *pending) if c.snapshot is not None}
        assert holders == {id(chunk) for chunk in self._holders.values()}, "a checkpoint is lost"
        children: dict[int, int] = {}
        kept: list[int] = []
        for key, chunk in self._chunks.items():
            assert chunk.key == key
            assert chunk.is_entered
            assert chunk.snapshot is not None or chunk.num_children, "a chunk is of no use"
            assert len(chunk.block_ids) == self.blocks_per_chunk
            kept += chunk.block_ids
            if (parent := chunk.parent) is not None:
                assert self._chunks[parent.key] is parent, "a chunk has lost its parent"
                children[id(parent)] = children.get(id(parent), 0) + 1
            assert chunk.number == (1 if parent is None else parent.number + 1)
        assert len(kept) == len(set(kept)) == self._pool.num_kept, "a block is of two chunks, or of none"
        assert all(c.num_children == children.get(id(c), 0) for c in self._chunks.values())
        leaves = {id(c) for c in self._chunks.values() if not c.num_children}
        assert {id(leaf) for leaf in self._leaves} == leaves, "a leaf is lost"

    def _insert(self, chunk: Chunk, parent: Chunk | None, block_ids: tuple[int, ...]) -> None:
        self._pool.keep(block_ids)
        chunk.parent, chunk.block_ids, chunk.is_entered = parent, block_ids, True
        self._chunks[chunk.key] = chunk
        self._num_changes += 1
        self._leaves[chunk] = None
        if parent is not None:
            self._leaves.pop(parent, None)
            parent.num_children += 1

    def _merge(self, chunk: Chunk, brought: Chunk) -> None:
        """An equal chunk is entered already."""
        place = brought.snapshot
        if chunk.snapshot is None and place is not None:
            chunk.snapshot, brought.snapshot = place, None
            self._holders[place] = chunk
            self._num_changes += 1
        self._free_place(brought)

    def _give_up(self, chunk: Chunk) -> None:
        """Take a chunk's checkpoint back, and remove what is of no use without it."""
        self._num_changes += 1
        if chunk.is_entered and chunk.snapshot is not None:
            state = (chunk.snapshot, _worth(chunk))
            self.prefix_host.eviction(chunk.key, chunk.number, chunk.last_use, state)
        self._free_place(chunk)
        last: Chunk | None = chunk
        while last is not None and last.is_entered and not last.num_children and last.snapshot is None:
            del self._chunks[last.key], self._leaves[last]
            last.is_entered = False
            self.prefix_host.eviction(last.key, last.number, last.last_use, block_ids=last.block_ids)
            self._pool.drop(last.block_ids)
            last = last.parent
            if last is not None:
                last.num_children -= 1
                if not last.num_children:
                    self._leaves[last] = None

    def _free_place(self, chunk: Chunk) -> None:
        if chunk.snapshot is not None:
            del self._holders[chunk.snapshot]
            self._free_places.append(chunk.snapshot)
            chunk.snapshot = None


def _worth(chunk: Chunk) -> int:
    """When a checkpoint's time is over."""
    return chunk.last_use + chunk.life
