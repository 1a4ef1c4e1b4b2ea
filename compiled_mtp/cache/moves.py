"""Carries out what a plan changes before its launch: admissions, releases, copies, drafts, block tables.

Moves are in no graph. A move runs on the launches' stream, after the earlier launches and before its own
plan's. Copies to and from host memory run on a copy stream of their own, concurrently with launches; only a
launch that would write what a copy reads, or read what it writes, waits.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from itertools import groupby

import torch

from compiled_mtp.cache.copy_stream import CopyStream
from compiled_mtp.cache.host_tier import HostTier, copy_out
from compiled_mtp.cache.kv_cache import KVCache
from compiled_mtp.cache.row_layout import RowLayout
from compiled_mtp.cache.slot_sampling import write_sampling
from compiled_mtp.cache.slot_tensors import SlotTensors
from compiled_mtp.plan import Admit, BlockUpdate, Copy, Draft, Location, Move, Release, StepPlan

logger = logging.getLogger(__name__)


class Moves:
    """The executor of `StepPlan.moves` over the registered tensors and every layer's blocks.

    A copy takes every registered row and the listed blocks, with their scales; a copy between a slot and a
    state snapshot has no blocks. It takes no row of the block table: the planner of a move into a slot lists
    the blocks in the plan's block_updates. holds_launches: every later launch waits for a copy, because the
    planner does not ask this object whether it is complete.
    """

    def __init__(
        self,
        slot_tensors: SlotTensors,
        block_table: torch.Tensor,
        kv_cache: KVCache,
        *,
        holds_launches: bool = False,
    ) -> None:
        self.slot_tensors = slot_tensors
        self.block_table = block_table
        self.num_blocks = kv_cache.num_blocks
        self._holds_launches = holds_launches
        self._block_layout = RowLayout(kv_cache.block_tensors())
        # Host memory by the name of its tier. Each tier has its own copy stream: a prefix hit must not wait
        # for the offload of a request, which takes longer.
        self._tiers: dict[str, HostTier] = {}
        self._copy_streams = {name: CopyStream(block_table.device) for name in ("host", "prefix_host")}
        # An engine may be dropped without `close`, also at the interpreter's end. Its memory is then reused
        # at once, so wait for the copies that still read or write it.
        weakref.finalize(self, _wait_for_all, tuple(self._copy_streams.values()))
        self._record_layout = RowLayout({})
        # State snapshots [num_snapshots, row_bytes] uint8.
        self._snapshot_layout = RowLayout({})
        self.snapshots = torch.empty((0, 0), dtype=torch.uint8)

    def allocate_host(self, num_records: int, num_blocks: int) -> None:
        """Replace the host tier by one of num_records rows, of what is registered now, and num_blocks blocks.

        What it held is lost. With a CUDA device its memory is pinned, so that copies need no further thread
        or buffer. Memory is allocated at first use.
        """
        self._record_layout = self._layout()
        sizes = (self._record_layout.row_bytes, self._block_layout.row_bytes)
        self._tiers["host"] = HostTier(*sizes, num_records, num_blocks, self.block_table.device)

    def allocate_snapshots(self, count: int) -> None:
        """Replace the device's state snapshots by `count` of them, for what is registered now."""
        self._snapshot_layout = self._layout(is_snapshot=True)
        shape = (count, self._snapshot_layout.row_bytes)
        self.snapshots = torch.empty(shape, dtype=torch.uint8, device=self.block_table.device)

    def allocate_prefix_host(self, num_records: int, num_blocks: int) -> None:
        """Replace the host tier of the prefix cache by one of num_records states and num_blocks blocks."""
        sizes = (self._snapshot_layout.row_bytes, self._block_layout.row_bytes)
        self._tiers["prefix_host"] = HostTier(*sizes, num_records, num_blocks, self.block_table.device)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that are allocated so far."""
        return sum(tier.allocated_bytes for tier in self._tiers.values())

    def _layout(self, *, is_snapshot: bool = False) -> RowLayout:
        """Return the layout of what is registered now, or of the part of it that a state snapshot holds."""
        entries = [entry for entry in self.slot_tensors if entry.is_in_snapshot or not is_snapshot]
        return RowLayout({entry.name: entry.tensor for entry in entries})

    def carry_out(self, plan: StepPlan) -> tuple[int, ...]:
        """Carry out the plan's moves in order, then its block_updates.

        Returns the ids of copies that never began because there is no memory for their target. Raises
        ValueError for a location that does not exist; the moves before it are then carried out.
        """
        failed: list[int] = []
        if plan.moves:
            for kind, moves in groupby(plan.moves, type):
                self._carry_out(kind, list(moves), plan.step_id, failed)
        if plan.block_updates:
            self._update_blocks(plan.block_updates)
        return tuple(failed)

    def save(self, plan: StepPlan) -> None:
        """Copy the plan's saves after its launch, before another launch overwrites the saved states."""
        for copy in plan.saves:
            self._copy(copy, plan.step_id)

    def take_done(self, plan: StepPlan, failed: Collection[int]) -> tuple[int, ...]:
        """Return the copies that are complete once the result of `plan` is read.

        They are the plan's own except `failed`, and late ones of earlier plans. After a plan of moves alone,
        waits for all of them.
        """
        own = [move for move in plan.moves if isinstance(move, Copy) and move.copy_id not in failed]
        at_once = [
            copy.copy_id
            for copy in own
            if (copy_stream := self._copy_stream(copy)) is None or not copy_stream.is_apart
        ]
        copy_streams, waits = self._copy_streams.values(), plan.kind == "move"
        return (
            *at_once,
            *(
                done
                for copy_stream in copy_streams
                for done in copy_stream.take_done(plan.step_id, waits=waits)
            ),
        )

    def wait(self, plan: StepPlan | None = None) -> None:
        """Wait for all copies; the copies of `plan`, or all for None, no longer count as under way."""
        for copy_stream in self._copy_streams.values():
            copy_stream.wait(None if plan is None else plan.step_id)

    def _copy_stream(self, copy: Copy) -> CopyStream | None:
        """Return the copy stream of a copy to or from host memory; None for a copy within the device."""
        return self._copy_streams.get(copy.target.tier) or self._copy_streams.get(copy.source.tier)

    def _carry_out(self, kind: type[Move], moves: Sequence[Move], step_id: int, failed: list[int]) -> None:
        if kind is Release:
            released = self._indices(move.slot for move in moves if isinstance(move, Release))
            self.block_table[released] = -1
        elif kind is Admit:
            self._admit([move for move in moves if isinstance(move, Admit)])
        elif kind is Draft:
            self._draft([move for move in moves if isinstance(move, Draft)])
        else:
            copies = [move for move in moves if isinstance(move, Copy)]
            for is_eviction, group in groupby(copies, lambda copy: copy.target.tier == "prefix_host"):
                if is_eviction:
                    failed += self._evict(list(group), step_id)
                else:
                    failed += [copy.copy_id for copy in group if not self._copy(copy, step_id)]

    def _admit(self, admitted: Sequence[Admit]) -> None:
        rows = self._indices(move.slot for move in admitted)
        for entry in self.slot_tensors:
            if entry.initial is not None:
                entry.tensor[rows] = entry.initial
        if any(move.rotary_delta for move in admitted):
            deltas = self._indices(move.rotary_delta for move in admitted)
            self.slot_tensors["rotary_delta"][rows] = deltas
        write_sampling(self.slot_tensors, admitted, self._to_device)
        for move in admitted:
            if move.text:
                text = self._to_device(torch.tensor(move.text, dtype=torch.int32))
                self.slot_tensors["token_ids"][move.slot, : len(text)] = text

    def _draft(self, moves: Sequence[Draft]) -> None:
        entries = [(move.slot, k, token_id) for move in moves for k, token_id in enumerate(move.token_ids)]
        slots, columns, token_ids = map(self._indices, zip(*entries, strict=True))
        self.slot_tensors["drafts"][slots, columns] = token_ids
        if "matched" in self.slot_tensors:
            self.slot_tensors["matched"][slots] = 0

    def _copy(self, copy: Copy, step_id: int) -> bool:
        """Queue a copy; return False if there is no memory for its target."""
        if not self._is_possible(copy):
            return False
        copy_stream = self._copy_stream(copy)
        if copy_stream is None:
            self._copy_rows(copy)
            return True
        with copy_stream.queue():
            self._copy_rows(copy)
            self._copy_blocks(copy, copy_stream)
            copy_stream.record(step_id, copy.copy_id)
        if copy.source.tier == "prefix_host" or self._holds_launches:
            copy_stream.hold_launches()
        return True

    def _evict(self, copies: Sequence[Copy], step_id: int) -> list[int]:
        """Queue copies to the host tier of the prefix cache; return those without memory.

        Their sources have new owners already. The plan's launch may write the blocks, so it waits for the
        block copies; the snapshots are overwritten only after the launch.
        """
        possible = [copy for copy in copies if self._is_possible(copy)]
        copy_stream = self._copy_streams["prefix_host"]
        with copy_stream.queue():
            for copy in possible:
                self._copy_blocks(copy, copy_stream)
        copy_stream.hold_launches()
        with copy_stream.queue():
            for copy in possible:
                if copy.has_rows:
                    self._copy_rows(copy)
                copy_stream.record(step_id, copy.copy_id)
        return [copy.copy_id for copy in copies if copy not in possible]

    def _is_possible(self, copy: Copy) -> bool:
        """Check a copy's locations; return False if there is no memory for its target."""
        for name, location, at in (("source", copy.source, 0), ("target", copy.target, 1)):
            self._check(name, location, [pair[at] for pair in copy.blocks])
        return copy.target.tier not in self._tiers or self._reserve(copy)

    def _copy_rows(self, copy: Copy) -> None:
        source, target = copy.source, copy.target
        tiers = (source.tier, target.tier)
        if tiers == ("slot", "snapshot"):
            # The copy of the snapshot's last state to the host may still be running.
            self._copy_streams["prefix_host"].hold_launches()
            self._snapshot_layout.pack(source.number, self.snapshots[target.number])
        elif tiers == ("snapshot", "slot"):
            self._snapshot_layout.unpack(target.number, self.snapshots[source.number])
        elif tiers == ("slot", "host"):
            pack = partial(self._record_layout.pack, source.number)
            self._copy_streams["host"].staging.store(pack, self._tiers["host"].buffers(target.number))
        elif tiers == ("snapshot", "prefix_host"):
            copy_out(self.snapshots[source.number], self._tiers["prefix_host"].buffers(target.number))
        else:
            assert tiers in (("host", "slot"), ("prefix_host", "slot")), tiers
            layout = self._record_layout if source.tier == "host" else self._snapshot_layout
            unpack = partial(layout.unpack, target.number)
            self._copy_streams[source.tier].staging.load(
                self._tiers[source.tier].buffers(source.number), unpack
            )

    def _copy_blocks(self, copy: Copy, copy_stream: CopyStream) -> None:
        """Copy blocks to or from host memory."""
        is_leaving, layout = copy.target.tier in self._tiers, self._block_layout
        device_ids = [pair[0 if is_leaving else 1] for pair in copy.blocks]
        host_ids = [pair[1 if is_leaving else 0] for pair in copy.blocks]
        tier = self._tiers[copy.target.tier if is_leaving else copy.source.tier]
        for indices, memory in tier.runs(host_ids):
            rows, buffers = self._indices(device_ids[index] for index in indices), [memory.view(-1)]
            if is_leaving:
                copy_stream.staging.store(partial(layout.pack_many, rows), buffers)
            else:
                copy_stream.staging.load(buffers, partial(layout.unpack_many, rows))

    def _reserve(self, copy: Copy) -> bool:
        record, block_ids = (
            copy.target.number if copy.has_rows else None,
            [target for _, target in copy.blocks],
        )
        tier, copy_stream = self._tiers[copy.target.tier], self._copy_streams[copy.target.tier]
        try:
            # The buffer for the largest copy at once, of copies back to the device too.
            copy_stream.reserve(tier.most_bytes_at_once)
            tier.reserve(record, block_ids)
        except (MemoryError, RuntimeError) as error:
            logger.warning(
                "no memory for what leaves the device, with %d MiB of host memory in use (%s); lower "
                "offload_gb or prefix_cache_gb",
                self.host_bytes >> 20,
                error,
            )
            return False
        return True

    def _check(self, name: str, location: Location, block_ids: Collection[int]) -> None:
        """Raise ValueError unless a location and these blocks in its tier exist."""
        tier, number = location
        host, blocks = self._tiers.get(tier), range(1, self.num_blocks)
        if tier == "slot":
            least, most = 1, self.block_table.shape[0] - 1
        elif host is not None:
            least, most, blocks = 0, host.num_records - 1, range(host.num_blocks)
        elif tier == "snapshot" and len(self.snapshots):
            least, most = 0, len(self.snapshots) - 1
        else:
            raise ValueError(
                f"{name} must be in an allocated tier, got {tier!r}; give the runner memory for it"
            )
        if not least <= number <= most:
            raise ValueError(
                f"{name} must be {tier} {least} to {most}, got {number}; give the runner memory for more"
            )
        if wrong := [block_id for block_id in block_ids if block_id not in blocks]:
            raise ValueError(
                f"{name} must have blocks {blocks.start} to {blocks.stop - 1}, got {wrong[0]}; give the "
                "runner memory for more"
            )

    def _update_blocks(self, updates: Sequence[BlockUpdate]) -> None:
        slots, columns, blocks = zip(*updates, strict=True)
        values = self._indices(blocks).to(torch.int32)
        self.block_table[self._indices(slots), self._indices(columns)] = values

    def _indices(self, values: Iterable[int]) -> torch.Tensor:
        return self._to_device(torch.tensor(list(values), dtype=torch.int64))

    def _to_device(self, host: torch.Tensor) -> torch.Tensor:
        if self.block_table.is_cuda:
            # The caching host allocator keeps a pinned block until the copy that reads it has run.
            return host.pin_memory().to(self.block_table.device, non_blocking=True)
        return host


def _wait_for_all(copy_streams: Iterable[CopyStream]) -> None:
    for copy_stream in copy_streams:
        copy_stream.wait()
