"""The host tier of the prefix cache: state snapshots and blocks that left the device. No torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(slots=True, eq=False)
class HostEntry:
    """What the tier holds of one chunk: its state in a record, or its blocks; `rows` are their numbers.

    priority: entries of the lowest are evicted first. is_ready: the copy to the host is complete.
    num_readers: the requests that will read the entry, and the copy that fills it.
    """

    key: bytes
    rows: tuple[int, ...]
    priority: tuple[int, int]
    is_ready: bool = False
    num_readers: int = 1


class Eviction(NamedTuple):
    """What the next plan copies from the device to the tier.

    snapshot, record: the state snapshot and the record that takes it; both None for blocks alone. blocks:
    pairs (device block, host block). entries: the tier's entries that the copy fills.
    """

    snapshot: int | None
    record: int | None
    blocks: tuple[tuple[int, int], ...]
    entries: tuple[HostEntry, ...]


class _HostRows:
    """The records, or the blocks, 0 to count - 1 of the tier, and the entries that use them by their keys."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.free = list(range(count - 1, -1, -1))
        self.entries: dict[bytes, HostEntry] = {}

    def put(self, key: bytes, size: int, priority: tuple[int, int]) -> HostEntry | None:
        """Add an entry of `size` rows for a chunk that has none, and evict entries of lower priority for it.

        Entries with readers stay. Returns None, and evicts nothing, if the others free too few rows, and for
        a chunk that has an entry, whose priority is raised.
        """
        if (known := self.entries.get(key)) is not None:
            known.priority = max(known.priority, priority)
            return None
        missing, evicted = size - len(self.free), list[HostEntry]()
        if missing > 0:
            for entry in sorted(self.entries.values(), key=lambda entry: entry.priority):
                if missing <= 0 or entry.priority >= priority:
                    break
                if not entry.num_readers:
                    evicted.append(entry)
                    missing -= len(entry.rows)
        if missing > 0:
            return None
        for entry in evicted:
            self.drop(entry)
        self.entries[key] = entry = HostEntry(key, tuple(self.free.pop() for _ in range(size)), priority)
        return entry

    def drop(self, entry: HostEntry) -> None:
        """Remove an entry and free its rows."""
        del self.entries[entry.key]
        self.free += entry.rows

    def check_integrity(self) -> None:
        """Raise AssertionError unless every row is free or used by exactly one entry."""
        rows = sorted([*self.free, *(row for entry in self.entries.values() for row in entry.rows)])
        assert len(set(rows)) == len(rows) == self.count, f"rows must be free or used once: {rows}"
        assert all(entry.key == key for key, entry in self.entries.items())


class PrefixHostTier:
    """The host tier of the prefix cache: num_records states and num_blocks blocks of chunks.

    Each is found by the chunk's key once the copy that fills it is complete. A state may be here without the
    chunk's blocks, and the reverse: the others are on the device or evicted. States are evicted by priority;
    blocks by least recent use, those of a prompt's last chunks first, so that a chunk whose blocks are here
    has those of the chunks before it too. An entry that a request will read stays until its copy is planned.
    """

    def __init__(self, num_records: int, num_blocks: int) -> None:
        self.num_records = num_records
        self.num_blocks = num_blocks
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._states = _HostRows(self.num_records)
        self._blocks = _HostRows(self.num_blocks)
        self._evictions: list[Eviction] = []
        # The entries that each planned copy fills.
        self._coming: dict[int, tuple[HostEntry, ...]] = {}

    @property
    def num_records_used(self) -> int:
        """Records that hold a state, or will after their copy."""
        return self._states.count - len(self._states.free)

    @property
    def num_blocks_used(self) -> int:
        """Blocks that hold keys and values, or will after their copy."""
        return self._blocks.count - len(self._blocks.free)

    def evict_to_host(
        self,
        key: bytes,
        number: int,
        last_use: int,
        snapshot: tuple[int, int] | None = None,
        block_ids: Sequence[int] = (),
    ) -> None:
        """Queue the copy of what chunk `number` of its prompt loses on the device, as far as there is room.

        snapshot: (state snapshot, the clock at which it expires). block_ids: the chunk's device blocks. What
        the tier already holds is not copied again.
        """
        entries: list[HostEntry] = []
        source, record, pairs = None, None, tuple[tuple[int, int], ...]()
        if snapshot is not None and (entry := self._states.put(key, 1, (snapshot[1], 0))):
            source, (record,) = snapshot[0], entry.rows
            entries.append(entry)
        if block_ids and (entry := self._blocks.put(key, len(block_ids), (last_use, -number))):
            pairs = tuple(zip(block_ids, entry.rows, strict=True))
            entries.append(entry)
        if entries:
            self._evictions.append(Eviction(source, record, pairs, tuple(entries)))

    def take_evictions(self) -> list[Eviction]:
        """Return, once, the queued evictions; the next plan copies them before all else."""
        evictions, self._evictions = self._evictions, []
        return evictions

    def begin(self, eviction: Eviction, copy_id: int) -> None:
        """Note that an eviction is planned as this copy."""
        self._coming[copy_id] = eviction.entries

    def finish_copies(self, copy_ids: Iterable[int]) -> None:
        """Make the entries of complete copies ready to be found."""
        for copy_id in copy_ids:
            for entry in self._coming.pop(copy_id, ()):
                entry.is_ready = True
                entry.num_readers -= 1

    def drop_copies(self, copy_ids: Iterable[int]) -> None:
        """Drop the entries of lost copies."""
        for copy_id in copy_ids:
            for entry in self._coming.pop(copy_id, ()):
                self._rows_of(entry).drop(entry)

    def cancel_copies(self, copy_ids: Collection[int]) -> None:
        """Drop the entries of copies for which the host had no memory; the tier shrinks to what it holds."""
        if not self._coming.keys() & set(copy_ids):
            return
        self.drop_copies(copy_ids)
        for rows in (self._states, self._blocks):
            rows.count -= len(rows.free)
            rows.free = []

    def has_state(self, key: bytes) -> bool:
        """Whether the state at a chunk's end is ready."""
        return _is_ready(self._states.entries.get(key))

    def has_blocks(self, key: bytes) -> bool:
        """Whether a chunk's blocks are ready."""
        return _is_ready(self._blocks.entries.get(key))

    def hold(self, key: bytes, number: int, expiry: int, last_use: int, *, is_state: bool) -> HostEntry:
        """Keep a chunk's state, or its blocks, for a request until `release`; raises the entry's priority.

        expiry: of a state, the clock at which it expires. last_use: of blocks, the clock now.
        """
        entry = (self._states if is_state else self._blocks).entries[key]
        entry.num_readers += 1
        entry.priority = max(entry.priority, (expiry, 0) if is_state else (last_use, -number))
        return entry

    def release(self, entries: Iterable[HostEntry]) -> None:
        """End `hold`: the copies that read the entries are planned, or never will be."""
        for entry in entries:
            entry.num_readers -= 1

    def check_integrity(self, held: Sequence[HostEntry]) -> None:
        """Raise AssertionError unless every row is free or used once, and every entry counts its readers:
        once in `held` for each request, and its own copy.
        """
        coming = [entry for entries in self._coming.values() for entry in entries]
        coming += [entry for eviction in self._evictions for entry in eviction.entries]
        for rows in (self._states, self._blocks):
            rows.check_integrity()
            for entry in rows.entries.values():
                readers = sum(one is entry for one in (*held, *coming))
                assert entry.num_readers == readers, "an entry's readers are miscounted"
                assert entry.is_ready != any(one is entry for one in coming), "a copy to the tier is lost"
        assert all(self._rows_of(entry).entries.get(entry.key) is entry for entry in (*held, *coming))

    def _rows_of(self, entry: HostEntry) -> _HostRows:
        return self._states if self._states.entries.get(entry.key) is entry else self._blocks


def _is_ready(entry: HostEntry | None) -> bool:
    return entry is not None and entry.is_ready
