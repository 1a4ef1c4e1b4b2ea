"""The one owner of slots, generations, blocks and host records, and of the transfers between them."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from compiled_mtp.cache.block_pool import BlockPool
from compiled_mtp.plan import BlockUpdate, Copy, Location, Release
from compiled_mtp.scheduler.limits import Limits
from compiled_mtp.scheduler.phases import RequestPhase
from compiled_mtp.scheduler.prefix import PrefixCache
from compiled_mtp.scheduler.scheduled_request import ScheduledRequest, Transfer


class Resources:
    """Gives out slots, blocks and host records, and takes them back.

    owners: unfinished requests by slot; moving: requests with a transfer; prefix: the prefix cache, which
    shares blocks between prompts and keeps some after their requests have ended.

    A launch in flight may still write to a slot or block that was taken back. It runs before the launches of
    the next owner, and the scheduler drops its tokens by their generation. Slots and blocks that a copy or
    the open round will still use are taken back after it.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._generations = [0] * (limits.max_batch + 1)
        self.prefix = PrefixCache(limits)
        self.reset()

    def reset(self) -> None:
        """Take everything back from every owner; the next plan releases all slots on the device."""
        self.pool = BlockPool(self.limits.num_blocks)
        self.prefix.reset(self.pool)
        self.host_pool = BlockPool(self.limits.host_blocks, first=0)
        self.owners: dict[int, ScheduledRequest] = {}
        self._free_slots = self._all_slots()
        self._free_records = list(range(self.limits.host_records - 1, -1, -1))
        # Records and blocks that host memory can hold: less than the limits after an allocation has failed.
        self._host_rooms = (self.limits.host_records, self.limits.host_blocks)
        self._pending_releases = self._all_slots() if any(self._generations) else []
        self.moving: list[ScheduledRequest] = []
        # Finished requests whose resources a copy or the open round still uses.
        self._kept: list[ScheduledRequest] = []

    @property
    def is_idle(self) -> bool:
        """Whether no request owns a slot, is moved, or has ended while a copy uses what it held."""
        return not (self.owners or self.moving or self._kept)

    @property
    def num_free_slots(self) -> int:
        """The slots that no request has."""
        return len(self._free_slots)

    def staying(self) -> list[ScheduledRequest]:
        """Return the requests that have a slot or move to one, except those that move to the host."""
        own = [one for one in self.owners.values() if not _is_leaving(one)]
        return own + [one for one in self.moving if one.phase is RequestPhase.OFFLOADED]

    def count_leaving(self) -> int:
        """Count the device blocks that become free when the requests on their way to the host arrive."""
        leaving = (one for one in self.moving if _is_leaving(one))
        return sum(self.pool.count_sole(one.block_ids) for one in leaving)

    def first_blocks(self, scheduled: ScheduledRequest) -> int:
        """Return the blocks for a request's prompt and the drafts after it."""
        return self.limits.blocks_up_to(scheduled.request.prompt_len - 1 + self.limits.mtp_step)

    def admit(self, scheduled: ScheduledRequest) -> None:
        """Give a waiting request a slot, its cached prefix, and the blocks for the rest of its prompt."""
        scheduled.reset_progress()
        scheduled.most_blocks = self.limits.worst_case_blocks(scheduled.request)
        scheduled.slot = self._free_slots.pop()
        scheduled.generation = self._next_generation(scheduled.slot)
        scheduled.resumption = self.prefix.resume(scheduled)
        scheduled.block_ids += self.pool.allocate(self.first_blocks(scheduled) - len(scheduled.block_ids))
        self.owners[scheduled.slot] = scheduled
        scheduled.enter(RequestPhase.PREFILLING)

    def preempt(self, scheduled: ScheduledRequest) -> None:
        """Take back a running or prefilling request's slot and blocks; it waits to be recomputed."""
        assert scheduled.transfer is None
        assert not scheduled.is_in_open_round
        del self.owners[scheduled.slot]
        self.prefix.leave(scheduled)
        self._free(Location("slot", scheduled.slot), scheduled.block_ids)
        scheduled.reset_progress()
        scheduled.enter(RequestPhase.WAITING)

    def count_missing(self, scheduled: ScheduledRequest, position: int, ahead: int = 0) -> int:
        """Return the blocks that a request lacks for every position up to `position`, and up to `ahead` more,
        within its worst case.
        """
        needed = min(self.limits.blocks_up_to(position) + ahead, scheduled.most_blocks)
        return max(needed - len(scheduled.block_ids), 0)

    def grow(self, scheduled: ScheduledRequest, count: int) -> list[BlockUpdate]:
        """Give a request `count` more blocks; return their entries in the block table."""
        owned = len(scheduled.block_ids)
        new = self.pool.allocate(count)
        scheduled.block_ids += new
        return [BlockUpdate(scheduled.slot, owned + index, block_id) for index, block_id in enumerate(new)]

    def give_back(self, scheduled: ScheduledRequest) -> None:
        """End a request; `sweep` takes back what it holds when no copy and no open round uses it."""
        scheduled.enter(RequestPhase.FINISHED)
        self.owners.pop(scheduled.slot, None)
        self.prefix.leave(scheduled)
        self._kept.append(scheduled)
        self.sweep()

    def sweep(self) -> None:
        """Take back the resources of finished requests that no copy and no open round uses."""
        ended = [scheduled for scheduled in self._kept if not scheduled.is_pinned]
        if not ended:
            return
        self._kept = [scheduled for scheduled in self._kept if scheduled.is_pinned]
        for scheduled in ended:
            if scheduled.transfer is not None:
                self._free(scheduled.transfer.target, scheduled.transfer.target_block_ids)
                self._end_transfer(scheduled)
            if (location := scheduled.location) is not None:
                self._free(location, scheduled.block_ids)
            scheduled.slot, scheduled.host_record, scheduled.block_ids = 0, None, []

    def host_room(self) -> tuple[int, int]:
        """Return the free records and blocks of host memory."""
        records, blocks = self._host_rooms
        used = self.limits.host_records - len(self._free_records)
        return max(records - used, 0), max(blocks - self.host_pool.num_used, 0)

    def offload(self, scheduled: ScheduledRequest) -> None:
        """Begin the transfer of a running request to the host, which must have room for it."""
        blocks = self.host_pool.allocate(len(scheduled.block_ids))
        self._begin_transfer(scheduled, Location("host", self._free_records.pop()), blocks)

    def resume(self, scheduled: ScheduledRequest) -> None:
        """Begin the transfer of an offloaded request to the device, which must have a slot and blocks."""
        blocks = self.pool.allocate(len(scheduled.block_ids))
        self._begin_transfer(scheduled, Location("slot", self._free_slots.pop()), blocks)

    def plan_copy(self, scheduled: ScheduledRequest, copy_id: int) -> tuple[Copy, list[BlockUpdate]]:
        """Return the copy of a transfer and the block-table row of its target slot.

        The results of all the request's launches must have been read.
        """
        transfer = scheduled.transfer
        assert transfer is not None
        assert transfer.copy_id is None, "a copy is planned once"
        transfer.copy_id = copy_id
        pairs = tuple(zip(scheduled.block_ids, transfer.target_block_ids, strict=True))
        return Copy(copy_id, transfer.source, transfer.target, pairs), self._target_row(scheduled)

    def finish_transfer(self, scheduled: ScheduledRequest) -> None:
        """End a transfer whose copy is complete: the request owns the target, and the source is free."""
        transfer = self._end_transfer(scheduled)
        if scheduled.phase is RequestPhase.FINISHED:
            self._free(transfer.target, transfer.target_block_ids)
            self.sweep()
            return
        self.owners.pop(scheduled.slot, None)
        self._free(transfer.source, scheduled.block_ids)
        scheduled.block_ids = transfer.target_block_ids
        if transfer.target.tier == "host":
            scheduled.slot, scheduled.host_record = 0, transfer.target.number
            scheduled.enter(RequestPhase.OFFLOADED)
            return
        scheduled.slot, scheduled.host_record = transfer.target.number, None
        scheduled.generation = transfer.generation
        self.owners[scheduled.slot] = scheduled
        scheduled.enter(RequestPhase.RUNNING)

    def cancel_copies(self, copy_ids: Collection[int]) -> list[ScheduledRequest]:
        """End the transfers of copies for which the host had no memory; return their requests.

        The requests stay where they are. The host's room shrinks to what it holds.
        """
        failed = [(h, h.transfer) for h in self.moving if h.transfer and h.transfer.copy_id in copy_ids]
        for scheduled, transfer in failed:
            self._end_transfer(scheduled)
            self._free(transfer.target, transfer.target_block_ids)
        if failed:
            used = self.limits.host_records - len(self._free_records)
            self._host_rooms = (used, self.host_pool.num_used)
        self.sweep()
        return [scheduled for scheduled, _ in failed]

    def drop_copies(self, copy_ids: Collection[int]) -> list[ScheduledRequest]:
        """Mark these copies, whose plan was lost, as not planned; return their unfinished requests."""
        lost = [(h, h.transfer) for h in self.moving if h.transfer and h.transfer.copy_id in copy_ids]
        for _, transfer in lost:
            transfer.copy_id = None
        self.sweep()
        return [scheduled for scheduled, _ in lost if scheduled.phase is not RequestPhase.FINISHED]

    def take_releases(self) -> list[Release]:
        """Return, once, the releases of the slots taken back after the last call."""
        slots, self._pending_releases = self._pending_releases, []
        return [Release(slot) for slot in slots]

    def release_again(self, next_copy_ids: Collection[int]) -> None:
        """After a lost plan, release again every slot that is free or whose owner no plan has installed.

        next_copy_ids: the copies of the next plan, whose target slots are released too.
        """
        installed = {
            scheduled.slot for scheduled in (*self.owners.values(), *self._kept) if scheduled.is_installed
        }
        installed |= {t.target.number for _, t in self._copied_to_slots() if t.copy_id not in next_copy_ids}
        self._pending_releases = [slot for slot in self._all_slots() if slot not in installed]
        for slot in self._pending_releases:
            # A release frees the features of an owner that no prompt chunk has installed.
            if slot in self.owners:
                self.owners[slot].forget_features()

    def all_block_updates(self) -> list[BlockUpdate]:
        """Return the block-table entries of all requests that are installed in a slot or copied to one."""
        installed = [scheduled for scheduled in self.owners.values() if scheduled.is_installed]
        entries = [block_table_row(scheduled.slot, scheduled.block_ids) for scheduled in installed]
        entries += [self._target_row(scheduled) for scheduled, _ in self._copied_to_slots()]
        return [entry for row in entries for entry in row]

    def check_integrity(self, live: Collection[ScheduledRequest]) -> None:
        """Raise AssertionError unless every slot, block and record is free or owned once, and the phase of
        each of the `live` requests agrees with what it holds.
        """
        everyone = {id(scheduled): scheduled for scheduled in (*live, *self._kept)}.values()
        transfers = [scheduled.transfer for scheduled in everyone if scheduled.transfer is not None]
        for scheduled in everyone:
            self._check_scheduled(scheduled)
        tiers = (
            ("slot", self.pool, self._free_slots, list(range(1, len(self._generations)))),
            ("host", self.host_pool, self._free_records, list(range(self.limits.host_records))),
        )
        for tier, pool, free, numbers in tiers:
            locations = [(location, h.block_ids) for h in everyone if (location := h.location) is not None]
            locations += [(transfer.target, transfer.target_block_ids) for transfer in transfers]
            owned = [(location.number, blocks) for location, blocks in locations if location.tier == tier]
            got = sorted([*free, *(number for number, _ in owned)])
            assert got == numbers, f"{tier} numbers must be free or owned once, got {got}"
            pool.check_integrity(block_id for _, blocks in owned for block_id in blocks)
        self.prefix.check_integrity()
        assert {id(h) for h in self.owners.values()} == {id(h) for h in live if h.slot}
        assert [id(h) for h in self.moving] == [id(h) for h in self.moving if h.transfer is not None]
        assert len(self.moving) == len(transfers)

    def _check_scheduled(self, scheduled: ScheduledRequest) -> None:
        phase, has_slot, has_record = scheduled.phase, scheduled.slot > 0, scheduled.host_record is not None
        if phase is RequestPhase.FINISHED:
            assert scheduled.is_pinned, "a finished request must be pinned"
        elif phase is RequestPhase.WAITING:
            assert (scheduled.location, scheduled.block_ids, scheduled.is_installed) == (None, [], False)
            known = () if scheduled.replay is None else scheduled.replay.known
            assert tuple(known) == tuple(scheduled.request.output_token_ids), (
                "a replay must know all delivered tokens"
            )
        else:
            is_offloaded = phase is RequestPhase.OFFLOADED
            assert (has_slot, has_record) == (not is_offloaded, is_offloaded), (
                f"{phase} disagrees with the location"
            )
        if has_slot and phase is not RequestPhase.FINISHED:
            assert self.owners[scheduled.slot] is scheduled
            assert scheduled.generation == self._generations[scheduled.slot], (
                "a slot's owner has an old generation"
            )

    def _begin_transfer(self, scheduled: ScheduledRequest, target: Location, blocks: list[int]) -> None:
        assert scheduled.location is not None
        assert scheduled.transfer is None, "a request is moved twice at once"
        generation = self._next_generation(target.number) if target.tier == "slot" else 0
        scheduled.transfer = Transfer(scheduled.location, target, generation, blocks)
        self.moving.append(scheduled)

    def _end_transfer(self, scheduled: ScheduledRequest) -> Transfer:
        transfer = scheduled.transfer
        assert transfer is not None, "there is no transfer to end"
        self.moving.remove(scheduled)
        scheduled.transfer = None
        return transfer

    def _copied_to_slots(self) -> list[tuple[ScheduledRequest, Transfer]]:
        copied = [(h, h.transfer) for h in self.moving if h.transfer is not None]
        return [(h, t) for h, t in copied if t.copy_id is not None and t.target.tier == "slot"]

    def _target_row(self, scheduled: ScheduledRequest) -> list[BlockUpdate]:
        transfer = scheduled.transfer
        assert transfer is not None
        if transfer.target.tier == "host":
            return []
        return block_table_row(transfer.target.number, transfer.target_block_ids)

    def _free(self, location: Location, block_ids: Iterable[int]) -> None:
        if location.tier == "host":
            self._free_records.append(location.number)
            self.host_pool.free(block_ids)
        else:
            self._free_slots.append(location.number)
            self._pending_releases.append(location.number)
            self.pool.free(block_ids)

    def _next_generation(self, slot: int) -> int:
        self._generations[slot] += 1
        return self._generations[slot]

    def _all_slots(self) -> list[int]:
        return list(range(len(self._generations) - 1, 0, -1))


def _is_leaving(scheduled: ScheduledRequest) -> bool:
    return scheduled.transfer is not None and scheduled.transfer.target.tier == "host"


def block_table_row(slot: int, block_ids: Iterable[int]) -> list[BlockUpdate]:
    """Return the block-table entries of a slot with these blocks."""
    return [BlockUpdate(slot, column, block_id) for column, block_id in enumerate(block_ids)]
