"""The index of the prefix cache: blocks of whole prompt chunks and state snapshots at their ends."""

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
"""The number of later prompts for which the snapshot of an end or a branching point is kept."""


def root_key(salt: str | None) -> bytes:
    """Return the key before the first chunk of prompts with this salt. None differs from an empty salt."""
    return _digest(b"" if salt is None else b"salt" + salt.encode())


def chain_key(before: bytes, token_ids: Sequence[int], images: Sequence[bytes] = ()) -> bytes:
    """Return the key of a chunk, from the key of the chunk before it, its own tokens, and the digests of the
    images that it touches, whose tokens are all alike."""
    return _digest(b"".join((before, array("q", token_ids).tobytes(), *images)))


def _digest(content: bytes) -> bytes:
    # Long enough that two prompts of one key cannot be made on purpose.
    return hashlib.blake2b(content, digest_size=32).digest()


@dataclass(slots=True, eq=False)
class Chunk:
    """A chunk of a prompt; its key stands for its tokens and all tokens before it. The first has number 1.

    snapshot: the index of the state snapshot at the chunk's end, or None. last_use: the clock of the
    `PrefixIndex`, in prompts. is_resume_point: the last prompt that used this chunk resumed at its end, or
    would if it came again. is_entered: prompts can find the chunk.
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
        """The number of prompts for which the chunk's snapshot is worth keeping.

        Among chunks that only lead to another chunk, those with a number divisible by 2^k live 2^k prompts: a
        long prompt thus loses its own snapshots before other prompts lose theirs.
        """
        is_inner = self.num_children == 1 or not self.is_entered
        return (
            min(self.number & -self.number, LONGEST_LIFE)
            if is_inner and not self.is_resume_point
            else LONGEST_LIFE
        )


class PrefixIndex:
    """Owns the cached blocks and snapshots: a tree of chunks over the blocks of a pool.

    Every chunk has its blocks and every leaf has a snapshot, so each chunk can serve a hit. The pool keeps
    a chunk's blocks; requests share them. Eviction is by least recent use: of blocks from leaves, first those
    that no request holds; of snapshots by `Chunk.life` too. A chunk that is not entered yet may lose its
    snapshot to another chunk. num_evictions counts snapshots evicted for others or with their blocks. Evicted
    blocks and snapshots go to `prefix_host`.
    """

    def __init__(self, num_snapshots: int, blocks_per_chunk: int, prefix_host: PrefixHostTier) -> None:
        self.num_snapshots = num_snapshots
        self.blocks_per_chunk = blocks_per_chunk
        self.prefix_host = prefix_host
        self.num_evictions = 0
        self.clock = 0
        # Counts the changes of what can be found.
        self._num_changes = 0

    def reset(self, pool: BlockPool) -> None:
        """Forget everything and index the blocks of `pool`, which must keep none."""
        self._pool = pool
        pool.reclaim = self.reclaim
        self._num_changes += 1
        self._chunks: dict[bytes, Chunk] = {}
        # In the order in which they became leaves; never more than snapshots.
        self._leaves: dict[Chunk, None] = {}
        # The chunk of each used snapshot, entered or not.
        self._holders: dict[int, Chunk] = {}
        self._free_snapshots = list(range(self.num_snapshots - 1, -1, -1))

    @property
    def num_snapshots_used(self) -> int:
        """Snapshots that chunks use."""
        return len(self._holders)

    @property
    def version(self) -> tuple[int, int]:
        """Changes whenever the result of `count_shared` may change."""
        return self._num_changes, self._pool.num_turns

    def find(self, key: bytes) -> Chunk | None:
        """Return the entered chunk of this key, or None."""
        return self._chunks.get(key)

    def match(self, keys: Sequence[bytes]) -> list[Chunk]:
        """Return the entered chunks that a new prompt of these keys begins with. Advances the clock."""
        self.clock += 1
        known: list[Chunk] = []
        for key in keys:
            chunk = self._chunks.get(key)
            if chunk is None:
                break
            known.append(chunk)
        return known

    def count_shared(self, keys: Sequence[bytes]) -> int:
        """Return how many blocks of the prompt's cached prefix other requests already hold."""
        count = held = 0
        for key in keys:
            chunk = self._chunks.get(key)
            if chunk is None:
                break
            count += sum(map(self._pool.is_held, chunk.block_ids))
            held = count if chunk.snapshot is not None else held
        return held

    def use(self, chunks: Sequence[Chunk]) -> list[int]:
        """Add a holder to the blocks of the chunks after which a prompt resumes; return them in order."""
        block_ids = [block_id for chunk in chunks for block_id in chunk.block_ids]
        self._pool.share(block_ids)
        for chunk in chunks:
            chunk.last_use = self.clock
        return block_ids

    def assign_snapshot(self, chunk: Chunk) -> bool:
        """Give a chunk that is not entered a snapshot, if one is free or expires sooner; return whether it
        has one.
        """
        chunk.last_use = self.clock
        if not self._free_snapshots:
            worst = min(self._holders.values(), key=_expiry, default=None)
            if worst is None or _expiry(worst) >= _expiry(chunk):
                return False
            self.num_evictions += 1
            self._evict(worst)
        chunk.snapshot = self._free_snapshots.pop()
        self._holders[chunk.snapshot] = chunk
        return True

    def enter(
        self, keys: Sequence[bytes], block_ids: Sequence[int], chunks: Collection[Chunk], resume_end: int
    ) -> None:
        """Enter the chunks of a prompt, so that later prompts find them.

        keys: of all chunks of the prompt. block_ids: begin with the blocks of those chunks, which the caller
        holds. chunks: those to which `assign_snapshot` gave a snapshot. resume_end: the number of the chunk
        after which the same prompt would resume. If an equal chunk is already entered, it stays and takes
        over the snapshot if it has none.
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
        """Take back the snapshots of chunks that will not be entered."""
        for chunk in chunks:
            self._free_snapshot(chunk)

    def reclaim(self, count: int) -> None:
        """Evict chunks, least recently used leaves first, until `count` more blocks of the pool are empty."""
        wanted = self._pool.num_empty + count
        order = itertools.count()
        leaves = [self._eviction_key(leaf, order) for leaf in self._leaves]
        heapq.heapify(leaves)
        while self._pool.num_empty < wanted:
            leaf = heapq.heappop(leaves)[-1]
            self.num_evictions += 1
            self._evict(leaf)
            above = leaf.parent
            while above is not None and not above.is_entered:
                above = above.parent
            if above is not None and not above.num_children:
                heapq.heappush(leaves, self._eviction_key(above, order))

    def _eviction_key(self, leaf: Chunk, order: Iterator[int]) -> tuple[bool, int, int, Chunk]:
        """Return the sort key of a leaf's eviction. A leaf that a request holds frees no block, so it comes
        last: it is evicted only to reach chunks above it.
        """
        return self._pool.is_held(leaf.block_ids[0]), leaf.last_use, next(order), leaf

    def check_integrity(self, pending: Collection[Chunk]) -> None:
        """Raise AssertionError unless the index is consistent.

        Every snapshot is free or belongs to exactly one chunk, entered or in `pending`; every chunk has a
        parent and blocks of its own; no leaf lacks a snapshot.
        """
        snapshots = sorted([*self._free_snapshots, *self._holders])
        assert snapshots == list(range(self.num_snapshots)), (
            f"snapshots must be free or used once: {snapshots}"
        )
        assert all(chunk.snapshot == snapshot for snapshot, chunk in self._holders.items())
        holders = {id(c) for c in (*self._chunks.values(), *pending) if c.snapshot is not None}
        assert holders == {id(chunk) for chunk in self._holders.values()}, "a snapshot is lost"
        children: dict[int, int] = {}
        kept: list[int] = []
        for key, chunk in self._chunks.items():
            assert chunk.key == key
            assert chunk.is_entered
            assert chunk.snapshot is not None or chunk.num_children, "a leaf must have a snapshot"
            assert len(chunk.block_ids) == self.blocks_per_chunk
            kept += chunk.block_ids
            if (parent := chunk.parent) is not None:
                assert self._chunks[parent.key] is parent, "a chunk has lost its parent"
                children[id(parent)] = children.get(id(parent), 0) + 1
            assert chunk.number == (1 if parent is None else parent.number + 1)
        assert len(kept) == len(set(kept)) == self._pool.num_kept, "a kept block must belong to one chunk"
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
        """Give the entered chunk the snapshot of an equal one that was brought, if it has none."""
        snapshot = brought.snapshot
        if chunk.snapshot is None and snapshot is not None:
            chunk.snapshot, brought.snapshot = snapshot, None
            self._holders[snapshot] = chunk
            self._num_changes += 1
        self._free_snapshot(brought)

    def _evict(self, chunk: Chunk) -> None:
        """Evict a chunk's snapshot, and the chunks that become leaves without a snapshot."""
        self._num_changes += 1
        if chunk.is_entered and chunk.snapshot is not None:
            state = (chunk.snapshot, _expiry(chunk))
            self.prefix_host.evict_to_host(chunk.key, chunk.number, chunk.last_use, state)
        self._free_snapshot(chunk)
        last: Chunk | None = chunk
        while last is not None and last.is_entered and not last.num_children and last.snapshot is None:
            del self._chunks[last.key], self._leaves[last]
            last.is_entered = False
            self.prefix_host.evict_to_host(last.key, last.number, last.last_use, block_ids=last.block_ids)
            self._pool.drop(last.block_ids)
            last = last.parent
            if last is not None:
                last.num_children -= 1
                if not last.num_children:
                    self._leaves[last] = None

    def _free_snapshot(self, chunk: Chunk) -> None:
        if chunk.snapshot is not None:
            del self._holders[chunk.snapshot]
            self._free_snapshots.append(chunk.snapshot)
            chunk.snapshot = None


def _expiry(chunk: Chunk) -> int:
    """Return the clock at which a snapshot expires."""
    return chunk.last_use + chunk.life
