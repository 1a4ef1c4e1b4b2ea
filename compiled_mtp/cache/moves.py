"""Carries out what a plan changes before its launch: admissions, releases, copies, block-table entries.

Everything is queued on the stream of the launches, outside every graph: a move happens after the launches
before it and before its own plan's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from compiled_mtp.cache.kv_cache import KVCache
from compiled_mtp.cache.slot_sampling import write_sampling
from compiled_mtp.cache.slot_tensors import SlotTensors
from compiled_mtp.plan import Admit, BlockUpdate, Copy, Move, Place, Release, StepPlan


@dataclass(frozen=True)
class _Tier:
    """Where requests may lie: by name, `rows` [places, ...] and `blocks` [blocks, ...]."""

    rows: Mapping[str, torch.Tensor]
    blocks: Mapping[str, torch.Tensor]


class Moves:
    """The executor of `StepPlan.moves` over the registered tensors and every layer's blocks.

    A copy takes every registered row and the listed blocks, with their scales. It takes no row of the block
    table: who moves a request into a slot lists its blocks in the plan's block_updates.
    """

    def __init__(self, slot_tensors: SlotTensors, block_table: torch.Tensor, kv_cache: KVCache) -> None:
        self.slot_tensors = slot_tensors
        self.block_table = block_table
        self._pages = dict(kv_cache.named_buffers())
        self._tiers: dict[str, _Tier] = {}

    def allocate_host(self, num_records: int, num_blocks: int) -> None:
        """Make the host tier anew: so many rows of what is registered now, and blocks; what it held is lost.

        Pinned memory beside a CUDA device, so that copies need no other thread or buffer.
        """

        def like(tensor: torch.Tensor, count: int) -> torch.Tensor:
            return torch.empty((count, *tensor.shape[1:]), dtype=tensor.dtype, pin_memory=tensor.is_cuda)

        self._tiers["host"] = _Tier(
            {entry.name: like(entry.tensor, num_records) for entry in self.slot_tensors},
            {name: like(pages, num_blocks) for name, pages in self._pages.items()},
        )

    def allocate_checkpoints(self, count: int) -> None:
        """Make the device's checkpoints anew: the rows, of what is registered now, that chunks leave."""
        rows = {
            entry.name: entry.tensor.new_empty((count, *entry.tensor.shape[1:]))
            for entry in self.slot_tensors
            if entry.is_in_checkpoint
        }
        self._tiers["checkpoint"] = _Tier(rows, {})

    def carry_out(self, plan: StepPlan) -> None:
        """The plan's moves, in their order, then its block_updates. A plan without any copies nothing.

        Raises ValueError for a place that does not exist; what came before it has been carried out.
        """
        if plan.moves:
            for kind, moves in groupby(plan.moves, type):
                self._carry_out(kind, list(moves))
        if plan.block_updates:
            self._update_blocks(plan.block_updates)

    def save(self, plan: StepPlan) -> None:
        """The plan's saves, behind its launch: before another one overwrites what it has left."""
        for copy in plan.saves:
            self._copy(copy)

    def _carry_out(self, kind: type[Move], moves: Sequence[Move]) -> None:
        if kind is Release:
            released = self._indices(move.slot for move in moves if isinstance(move, Release))
            self.block_table[released] = -1
        elif kind is Admit:
            self._admit([move for move in moves if isinstance(move, Admit)])
        else:
            for move in moves:
                assert isinstance(move, Copy)
                self._copy(move)

    def _admit(self, admitted: Sequence[Admit]) -> None:
        rows = self._indices(move.slot for move in admitted)
        for entry in self.slot_tensors:
            if entry.initial is not None:
                entry.tensor[rows] = entry.initial
        write_sampling(self.slot_tensors, admitted, self._to_device)

    def _copy(self, copy: Copy) -> None:
        source, target = self._tier("source", copy.source), self._tier("target", copy.target)
        # A checkpoint has some of a slot's rows; other tiers have all of them.
        has_some = "checkpoint" in (copy.source.tier, copy.target.tier)
        by_dtype: dict[torch.dtype, list[str]] = {}
        for name in min(source.rows, target.rows, key=len) if has_some else source.rows:
            by_dtype.setdefault(source.rows[name].dtype, []).append(name)
        for same in by_dtype.values():
            targets = [target.rows[name][copy.target.number] for name in same]
            sources = [source.rows[name][copy.source.number] for name in same]
            # A launch for many rows where both tiers are the device's.
            torch._foreach_copy_(targets, sources, non_blocking=True)
        for name, blocks in source.blocks.items():
            for source_id, target_id in copy.blocks:
                target.blocks[name][target_id].copy_(blocks[source_id], non_blocking=True)

    def _tier(self, name: str, place: Place) -> _Tier:
        if place.tier == "slot":
            slots = {entry.name: entry.tensor for entry in self.slot_tensors}
            return _Tier(slots, self._pages)
        if place.tier in self._tiers:
            return self._tiers[place.tier]
        raise ValueError(
            f"{name} must lie in a tier that was allocated, got {place.tier!r}; give the runner room for it"
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
