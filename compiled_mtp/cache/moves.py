"""Carries out what a plan changes before its launch: admissions, releases, copies, drafts, block tables.

Everything is queued on the stream of the launches, outside every graph: a move happens after the launches
before it and before its own plan's.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from itertools import groupby

import torch

from compiled_mtp.cache.host_tier import HostTier, Staging, copy_out
from compiled_mtp.cache.kv_cache import KVCache
from compiled_mtp.cache.row_layout import RowLayout
from compiled_mtp.cache.slot_sampling import write_sampling
from compiled_mtp.cache.slot_tensors import SlotTensors
from compiled_mtp.plan import Admit, BlockUpdate, Copy, Draft, Move, Place, Release, StepPlan

logger = logging.getLogger(__name__)


class Moves:
    """The executor of `StepPlan.moves` over the registered tensors and every layer's blocks.

    A copy takes every registered row and the listed blocks, with their scales. It takes no row of the block
    table: who moves a request into a slot lists its blocks in the plan's block_updates.
    """

    def __init__(self, slot_tensors: SlotTensors, block_table: torch.Tensor, kv_cache: KVCache) -> None:
        self.slot_tensors = slot_tensors
        self.block_table = block_table
        self.num_blocks = kv_cache.num_blocks
        self._staging = Staging(block_table.device)
        self._block_layout = RowLayout(kv_cache.block_tensors())
        # By the name of the tier.
        self._tiers: dict[str, HostTier] = {}
        self._record_layout = RowLayout({})
        # What checkpoints hold [checkpoints, row_bytes] uint8.
        self._checkpoint_layout = RowLayout({})
        self.checkpoints = torch.empty((0, 0), dtype=torch.uint8)

    def allocate_host(self, num_records: int, num_blocks: int) -> None:
        """Make the host tier anew: so many rows of what is registered now, and blocks; what it held is lost.

        Pinned memory beside a CUDA device, so that copies need no other thread or buffer. None is taken
        before it is needed.
        """
        self._record_layout = self._layout()
        sizes = (self._record_layout.row_bytes, self._block_layout.row_bytes)
        self._tiers["host"] = HostTier(*sizes, num_records, num_blocks, self.block_table.device)

    def allocate_checkpoints(self, count: int) -> None:
        """Make the device's checkpoints anew: the rows, of what is registered now, that chunks leave."""
        self._checkpoint_layout = self._layout(is_checkpoint=True)
        shape = (count, self._checkpoint_layout.row_bytes)
        self.checkpoints = torch.empty(shape, dtype=torch.uint8, device=self.block_table.device)

    def allocate_shelf(self, num_records: int, num_blocks: int) -> None:
        """Make the host tier of checkpoints anew, as `allocate_host` does: so many of them, and blocks."""
        sizes = (self._checkpoint_layout.row_bytes, self._block_layout.row_bytes)
        self._tiers["shelf"] = HostTier(*sizes, num_records, num_blocks, self.block_table.device)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that have been needed so far."""
        return sum(tier.allocated_bytes for tier in self._tiers.values())

    def _layout(self, *, is_checkpoint: bool = False) -> RowLayout:
        """Of what is registered now, or of that of it which is in a checkpoint."""
        entries = [entry for entry in self.slot_tensors if entry.is_in_checkpoint or not is_checkpoint]
        return RowLayout({entry.name: entry.tensor for entry in entries})

    def carry_out(self, plan: StepPlan) -> tuple[int, ...]:
        """The plan's moves, in their order, then its block_updates. A plan without any copies nothing.

        Returns the ids of copies that never began, since there is no memory for their target. Raises
        ValueError for a place that does not exist; what came before it has been carried out.
        """
        failed: list[int] = []
        if plan.moves:
            for kind, moves in groupby(plan.moves, type):
                self._carry_out(kind, list(moves), failed)
        if plan.block_updates:
            self._update_blocks(plan.block_updates)
        return tuple(failed)

    def save(self, plan: StepPlan) -> None:
        """The plan's saves, behind its launch: before another one overwrites what it has left."""
        for copy in plan.saves:
            self._copy(copy)

    def _carry_out(self, kind: type[Move], moves: Sequence[Move], failed: list[int]) -> None:
        if kind is Release:
            released = self._indices(move.slot for move in moves if isinstance(move, Release))
            self.block_table[released] = -1
        elif kind is Admit:
            self._admit([move for move in moves if isinstance(move, Admit)])
        elif kind is Draft:
            self._draft([move for move in moves if isinstance(move, Draft)])
        else:
            for move in moves:
                assert isinstance(move, Copy)
                if not self._copy(move):
                    failed.append(move.copy_id)

    def _admit(self, admitted: Sequence[Admit]) -> None:
        rows = self._indices(move.slot for move in admitted)
        for entry in self.slot_tensors:
            if entry.initial is not None:
                entry.tensor[rows] = entry.initial
        write_sampling(self.slot_tensors, admitted, self._to_device)

    def _draft(self, moves: Sequence[Draft]) -> None:
        entries = [(move.slot, k, token_id) for move in moves for k, token_id in enumerate(move.token_ids)]
        slots, columns, token_ids = map(self._indices, zip(*entries, strict=True))
        self.slot_tensors["drafts"][slots, columns] = token_ids

    def _copy(self, copy: Copy) -> bool:
        """Queue a copy; False if there is no memory for it."""
        for name, place, at in (("source", copy.source, 0), ("target", copy.target, 1)):
            self._check(name, place, [pair[at] for pair in copy.blocks])
        if copy.target.tier in self._tiers and not self._reserve(copy):
            return False
        if copy.has_rows:
            self._copy_rows(copy.source, copy.target)
        if copy.blocks:
            self._copy_blocks(copy)
        return True

    def _copy_rows(self, source: Place, target: Place) -> None:
        tiers = (source.tier, target.tier)
        if tiers == ("slot", "slot"):
            self._layout().copy(source.number, target.number)
        elif tiers == ("slot", "checkpoint"):
            self._checkpoint_layout.pack(source.number, self.checkpoints[target.number])
        elif tiers == ("checkpoint", "slot"):
            self._checkpoint_layout.unpack(target.number, self.checkpoints[source.number])
        elif tiers == ("slot", "host"):
            pack = partial(self._record_layout.pack, source.number)
            self._staging.store(pack, self._tiers["host"].pieces(target.number))
        elif tiers == ("checkpoint", "shelf"):
            copy_out(self.checkpoints[source.number], self._tiers["shelf"].pieces(target.number))
        else:
            assert tiers in (("host", "slot"), ("shelf", "slot")), tiers
            layout = self._record_layout if source.tier == "host" else self._checkpoint_layout
            unpack = partial(layout.unpack, target.number)
            self._staging.load(self._tiers[source.tier].pieces(source.number), unpack)

    def _copy_blocks(self, copy: Copy) -> None:
        sources, targets = (list(ids) for ids in zip(*copy.blocks, strict=True))
        layout, is_leaving = self._block_layout, copy.target.tier in self._tiers
        if copy.source.tier == copy.target.tier:
            num_bytes = len(sources) * layout.row_bytes
            flat = torch.empty(num_bytes, dtype=torch.uint8, device=self.block_table.device)
            layout.pack_many(self._indices(sources), flat)
            layout.unpack_many(self._indices(targets), flat)
            return
        device_ids, host_ids = (sources, targets) if is_leaving else (targets, sources)
        tier = self._tiers[copy.target.tier if is_leaving else copy.source.tier]
        for indices, memory in tier.runs(host_ids):
            rows, pieces = self._indices(device_ids[index] for index in indices), [memory.view(-1)]
            if is_leaving:
                self._staging.store(partial(layout.pack_many, rows), pieces)
            else:
                self._staging.load(pieces, partial(layout.unpack_many, rows))

    def _reserve(self, copy: Copy) -> bool:
        record, block_ids = (
            copy.target.number if copy.has_rows else None,
            [target for _, target in copy.blocks],
        )
        try:
            self._tiers[copy.target.tier].reserve(record, block_ids)
        except (MemoryError, RuntimeError) as error:
            logger.warning(
                "host memory could not be had, with %d MiB taken (%s); lower offload_gb or prefix_cache_gb",
                self.host_bytes >> 20,
                error,
            )
            return False
        return True

    def _check(self, name: str, place: Place, block_ids: Collection[int]) -> None:
        """Raise ValueError unless a place and its blocks exist."""
        tier, number = place
        host, blocks = self._tiers.get(tier), range(1, self.num_blocks)
        if tier == "slot":
            least, most = 1, self.block_table.shape[0] - 1
        elif host is not None:
            least, most, blocks = 0, host.num_records - 1, range(host.num_blocks)
        elif tier == "checkpoint" and len(self.checkpoints):
            least, most = 0, len(self.checkpoints) - 1
        else:
            raise ValueError(
                f"{name} must lie in a tier that was allocated, got {tier!r}; give the runner room for it"
            )
        if not least <= number <= most:
            raise ValueError(
                f"{name} must be {tier} {least} to {most}, got {number}; give the runner room for more"
            )
        if wrong := [block_id for block_id in block_ids if block_id not in blocks]:
            raise ValueError(
                f"{name} must have blocks {blocks.start} to {blocks.stop - 1}, got {wrong[0]}; give the "
                "runner room for more"
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
