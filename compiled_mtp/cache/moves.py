"""Carries out what a plan changes before its launch: admissions, releases, copies, drafts, block tables.

Everything is queued on the stream of the launches, outside every graph: a move happens after the launches
before it and before its own plan's.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from itertools import groupby

import torch

from compiled_mtp.cache.host_tier import HostTier
from compiled_mtp.cache.kv_cache import KVCache
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
        self._pages = dict(kv_cache.named_buffers())
        self.host: HostTier | None = None
        # By name, what checkpoints hold [checkpoints, ...].
        self._checkpoints: dict[str, torch.Tensor] = {}
        self._num_checkpoints = 0

    def allocate_host(self, num_records: int, num_blocks: int) -> None:
        """Make the host tier anew: so many rows of what is registered now, and blocks; what it held is lost.

        Pinned memory beside a CUDA device, so that copies need no other thread or buffer. None is taken
        before it is needed.
        """
        rows = {entry.name: entry.tensor for entry in self.slot_tensors}
        self.host = HostTier(rows, self._pages, num_records, num_blocks)

    def allocate_checkpoints(self, count: int) -> None:
        """Make the device's checkpoints anew: the rows, of what is registered now, that chunks leave."""
        self._num_checkpoints = count
        self._checkpoints = {
            entry.name: entry.tensor.new_empty((count, *entry.tensor.shape[1:]))
            for entry in self.slot_tensors
            if entry.is_in_checkpoint
        }

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
        if copy.target.tier == "host" and not self._reserve(copy):
            return False
        # A checkpoint has some of a slot's rows; other tiers have all of them.
        has_some = "checkpoint" in (copy.source.tier, copy.target.tier)
        by_dtype: dict[torch.dtype, list[str]] = {}
        for entry in self.slot_tensors:
            if entry.is_in_checkpoint or not has_some:
                by_dtype.setdefault(entry.tensor.dtype, []).append(entry.name)
        for names in by_dtype.values():
            targets = [self._row(name, copy.target) for name in names]
            sources = [self._row(name, copy.source) for name in names]
            # A launch for many rows where both tiers are the device's.
            torch._foreach_copy_(targets, sources, non_blocking=True)
        for name in self._pages:
            for source_id, target_id in copy.blocks:
                source = self._block(name, copy.source, source_id)
                self._block(name, copy.target, target_id).copy_(source, non_blocking=True)
        return True

    def _reserve(self, copy: Copy) -> bool:
        assert self.host is not None
        try:
            self.host.reserve(copy.target.number, [target_id for _, target_id in copy.blocks])
        except (MemoryError, RuntimeError) as error:
            logger.warning(
                "host memory for a request could not be had, with %d MiB taken (%s); lower offload_gb",
                self.host.allocated_bytes >> 20,
                error,
            )
            return False
        return True

    def _check(self, name: str, place: Place, block_ids: Collection[int]) -> None:
        """Raise ValueError unless a place and its blocks exist."""
        tier, number = place
        if tier == "slot":
            least, most, blocks = 1, self.block_table.shape[0] - 1, range(1, self.num_blocks)
        elif tier == "host" and self.host is not None:
            least, most, blocks = 0, self.host.num_records - 1, range(self.host.num_blocks)
        elif tier == "checkpoint" and self._num_checkpoints:
            least, most, blocks = 0, self._num_checkpoints - 1, range(0)
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

    def _row(self, name: str, place: Place) -> torch.Tensor:
        if place.tier == "slot":
            return self.slot_tensors[name][place.number]
        if place.tier == "checkpoint":
            return self._checkpoints[name][place.number]
        assert self.host is not None
        return self.host.row(name, place.number)

    def _block(self, name: str, place: Place, block_id: int) -> torch.Tensor:
        if place.tier == "slot":
            return self._pages[name][block_id]
        assert self.host is not None
        return self.host.block(name, block_id)

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
