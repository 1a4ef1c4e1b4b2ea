"""What the prefix cache keeps in host memory of what has left the device: states and blocks. No torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(slots=True, eq=False)
class Item:
    """What one chunk has on the shelf: a record, or blocks, in `places`.

    worth orders those that are given up, the lowest first. is_ready: the copy that brings it is complete.
    num_readers: those who are going to be given it, and the copy that brings it.
    """

    key: bytes
    places: tuple[int, ...]
    worth: tuple[int, int]
    is_ready: bool = False
    num_readers: int = 1


class Eviction(NamedTuple):
    """What leaves the device with the next plan: the state in a checkpoint, to a record of the shelf (None
    and None: no state), and blocks, pairs of one of the device and one of the shelf.
    """

    snapshot: int | None
    record: int | None
    blocks: tuple[tuple[int, int], ...]
    items: tuple[Item, ...]


class _Row:
    """Places 0 to count - 1, and who has them."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.free = list(range(count - 1, -1, -1))
        self.items: dict[bytes, Item] = {}

    def put(self, key: bytes, size: int, worth: tuple[int, int]) -> Item | None:
        """Room for a chunk that has none, at the cost of what is worth less; None if that is not enough."""
        missing, given_up = size - len(self.free), list[Item]()
        if missing > 0:
            for item in sorted(self.items.values(), key=lambda item: item.worth):
                if missing <= 0 or item.worth >= worth:
                    break
                if not item.num_readers:
                    given_up.append(item)
                    missing -= len(item.places)
        if missing > 0:
            return None
        for item in given_up:
            self.drop(item)
        self.items[key] = item = Item(key, tuple(self.free.pop() for _ in range(size)), worth)
        return item

    def drop(self, item: Item) -> None:
        """Forget what a chunk has."""
        del self.items[item.key]
        self.free += item.places

    def check_integrity(self) -> None:
        """Raise AssertionError unless every place is free or had once, but for those that were cut off."""
        places = sorted([*self.free, *(place for item in self.items.values() for place in item.places)])
        assert len(set(places)) == len(places) == self.count, f"places must be free or had once: {places}"
        assert all(item.key == key for key, item in self.items.items())


class PrefixHostTier:
    """The host tier of the prefix cache: num_records states and num_blocks blocks of chunks.

    Each is found by the chunk's key once the copy that brings it is complete.

    A state may be here without its blocks, which are then on the device or given up, and the reverse. States
    that are worth less go first, and blocks that were of use the longest time ago, the ends of prompts
    first: so that whoever finds a chunk's blocks finds those of the chunks before. What somebody is going to
    be given stays until that is planned.
    """

    def __init__(self, num_records: int, num_blocks: int) -> None:
        self.num_records = num_records
        self.num_blocks = num_blocks
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._states = _Row(self.num_records)
        self._blocks = _Row(self.num_blocks)
        self._evictions: list[Eviction] = []
        self._coming: dict[int, tuple[Item, ...]] = {}

    @property
    def num_records_used(self) -> int:
        """Records that hold a state, or will."""
        return self._states.count - len(self._states.free)

    @property
    def num_blocks_used(self) -> int:
        """Blocks that hold keys and values, or will."""
        return self._blocks.count - len(self._blocks.free)

    def eviction(
        self,
        key: bytes,
        number: int,
        last_use: int,
        snapshot: tuple[int, int] | None = None,
        block_ids: Sequence[int] = (),
    ) -> None:
        """Chunk `number` of its prompt gives up a state, as (checkpoint, what it is worth), or blocks: keep
        what is not here yet, if there is room.
        """
        items: list[Item] = []
        record, pairs = None, tuple[tuple[int, int], ...]()
        if snapshot is not None and self._is_new(self._states, key, (snapshot[1], 0)):
            item = self._states.put(key, 1, (snapshot[1], 0))
            if item is not None:
                (record,) = item.places
                items.append(item)
        if block_ids and self._is_new(self._blocks, key, (last_use, -number)):
            item = self._blocks.put(key, len(block_ids), (last_use, -number))
            if item is not None:
                pairs = tuple(zip(block_ids, item.places, strict=True))
                items.append(item)
        if items:
            place = None if record is None or snapshot is None else snapshot[0]
            self._evictions.append(Eviction(place, record, pairs, tuple(items)))

    def take_evictions(self) -> list[Eviction]:
        """What the plan that is made now copies, before anything else."""
        evictions, self._evictions = self._evictions, []
        return evictions

    def begin(self, eviction: Eviction, copy_id: int) -> None:
        """A spill has been planned as this copy."""
        self._coming[copy_id] = eviction.items

    def finish_copies(self, copy_ids: Iterable[int]) -> None:
        """These copies are complete: what they brought can be found."""
        for copy_id in copy_ids:
            for item in self._coming.pop(copy_id, ()):
                item.is_ready = True
                item.num_readers -= 1

    def drop_copies(self, copy_ids: Iterable[int]) -> None:
        """These copies were lost, and with them what they were to bring."""
        for copy_id in copy_ids:
            for item in self._coming.pop(copy_id, ()):
                self._row_of(item).drop(item)

    def cancel_copies(self, copy_ids: Collection[int]) -> None:
        """Host memory could not be had for these copies: the shelf is as large as what it holds."""
        if not self._coming.keys() & set(copy_ids):
            return
        self.drop_copies(copy_ids)
        for row in (self._states, self._blocks):
            row.count -= len(row.free)
            row.free = []

    def has_state(self, key: bytes) -> bool:
        """Whether the state at a chunk's end can be had."""
        return _is_ready(self._states.items.get(key))

    def has_blocks(self, key: bytes) -> bool:
        """Whether a chunk's blocks can be had."""
        return _is_ready(self._blocks.items.get(key))

    def hold(self, key: bytes, number: int, worth: int, last_use: int, *, is_state: bool) -> Item:
        """Keep a chunk's state, or its blocks, for somebody until `release`; it is of use now."""
        item = (self._states if is_state else self._blocks).items[key]
        item.num_readers += 1
        item.worth = max(item.worth, (worth, 0) if is_state else (last_use, -number))
        return item

    def release(self, items: Iterable[Item]) -> None:
        """Their copy has been planned, or never will be."""
        for item in items:
            item.num_readers -= 1

    def check_integrity(self, held: Sequence[Item]) -> None:
        """Raise AssertionError unless every place is free or had once, and everything waits for those readers
        that there are.
        """
        coming = [item for items in self._coming.values() for item in items]
        coming += [item for eviction in self._evictions for item in eviction.items]
        for row in (self._states, self._blocks):
            row.check_integrity()
            for item in row.items.values():
                readers = sum(one is item for one in (*held, *coming))
                assert item.num_readers == readers, "a reader of the shelf is lost"
                assert item.is_ready != any(one is item for one in coming), "a copy to the shelf is lost"
        assert all(self._row_of(item).items.get(item.key) is item for item in (*held, *coming))

    def _is_new(self, row: _Row, key: bytes, worth: tuple[int, int]) -> bool:
        """Whether a chunk has nothing here; what it has is worth as much as it is now."""
        item = row.items.get(key)
        if item is not None:
            item.worth = max(item.worth, worth)
        return item is None

    def _row_of(self, item: Item) -> _Row:
        return self._states if self._states.items.get(item.key) is item else self._blocks


def _is_ready(item: Item | None) -> bool:
    return item is not None and item.is_ready
