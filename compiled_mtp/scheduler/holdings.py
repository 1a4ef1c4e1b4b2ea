"""The one owner of slots, generations, blocks and host records: who holds what, and what is on its way."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from compiled_mtp.cache.block_pool import BlockPool
from compiled_mtp.plan import BlockUpdate, Copy, Place, Release
from compiled_mtp.request import NO_DRAFT, Request
from compiled_mtp.scheduler.limits import Limits
from compiled_mtp.scheduler.phases import RequestPhase, check_transition
from compiled_mtp.scheduler.prefix import PrefixCache, Resumption
from compiled_mtp.scheduler.replay import Replay


@dataclass(slots=True, eq=False)
class Transfer:
    """A request on its way from one place to another; both, and the blocks there, belong to it till the end.

    copy_id is None until the copy has been planned: before, the request's launches are still to be read.
    """

    source: Place
    target: Place
    generation: int
    target_block_ids: list[int]
    copy_id: int | None = None


@dataclass(slots=True, eq=False)
class Holding:
    """A request, the phase it is in, and what it holds: slot (0: none), its generation, host record (None:
    none), and blocks of the tier where it stands.

    arrival: its number among all, in the order in which they came. is_due: it has waited so long that it now
    goes before all others. resumption: what its slot is filled from at its first launch; None: it begins at
    position 0. prefix_keys: of its prompt's whole chunks, once they are known. is_looked_up: the prefix cache
    has counted it. is_told: the device knows who
    owns the slot. is_in_open_round: its round was verified and its accept is still to be planned. drafts:
    what was drafted for its next round, where its grammar or caller asks for it. num_deferred: its rounds
    without drafts since the draft model last read their inputs. replay: its tokens are computed again.
    """

    request: Request
    arrival: int = 0
    phase: RequestPhase = RequestPhase.WAITING
    is_due: bool = False
    slot: int = 0
    generation: int = 0
    host_record: int | None = None
    block_ids: list[int] = field(default_factory=list)
    num_prefilled: int = 0
    resumption: Resumption | None = None
    prefix_keys: list[bytes] | None = None
    is_looked_up: bool = False
    is_told: bool = False
    is_first_token_due: bool = False
    is_in_open_round: bool = False
    drafts: Sequence[int] = ()
    num_deferred: int = 0
    transfer: Transfer | None = None
    replay: Replay | None = None

    def enter(self, phase: RequestPhase) -> None:
        """Go on to `phase`; raises AssertionError for one that may not follow."""
        check_transition(self.phase, phase)
        self.phase = phase

    @property
    def rank(self) -> tuple[int, int, int]:
        """Who goes first, the lowest: those that are due, then by priority, then by arrival."""
        return (0, 0, self.arrival) if self.is_due else (1, self.request.priority, self.arrival)

    @property
    def num_emitted(self) -> int:
        """Output tokens that were read since its prompt was prefilled."""
        replay = self.replay
        return len(self.request.output_token_ids) if replay is None else replay.num_compared

    def round_drafts(self, verify: int) -> Sequence[int]:
        """The drafts of the round whose accept is planned, where they are asked for."""
        uploaded = () if self.replay is None else self.replay.uploaded
        known = [*uploaded, *self.drafts[len(uploaded) : verify]]
        return known + [NO_DRAFT] * (verify - len(known))

    def forget_place(self) -> None:
        """Know nothing of a slot or of what was computed there: begin, or begin again."""
        self.slot, self.block_ids, self.num_prefilled = 0, [], 0
        self.is_told = self.is_first_token_due = False
        self.drafts, self.num_deferred = (), 0
        known = self.request.output_token_ids
        self.replay = Replay(tuple(known)) if known else None

    @property
    def place(self) -> Place | None:
        """Where its rows lie."""
        if self.host_record is not None:
            return Place("host", self.host_record)
        return Place("slot", self.slot) if self.slot else None

    @property
    def is_prefilled(self) -> bool:
        """Whether every chunk of its prompt has been planned."""
        return self.num_prefilled == self.request.prompt_len

    @property
    def is_pinned(self) -> bool:
        """Whether a launch or a copy is still to touch what it holds, in whatever order it runs."""
        is_copied = self.transfer is not None and self.transfer.copy_id is not None
        return is_copied or self.is_in_open_round


class Holdings:
    """Gives out slots, blocks and host records, and takes them back.

    `owners` maps slots to the holdings of requests that have not ended, `moving` are those with a transfer.
    `prefix` says which blocks of others a request begins with; it keeps some when their owners have ended.

    A launch in flight may still write what was taken back: it runs before the next owner's, and its tokens
    are dropped by generation. What a copy or the second half of a round will touch is kept until they are
    through.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._generations = [0] * (limits.max_batch + 1)
        self.prefix = PrefixCache(limits)
        self.reset()

    def reset(self) -> None:
        """Take everything back, whoever holds it; the device is to be told that every slot is free."""
        self.pool = BlockPool(self.limits.num_blocks)
        self.prefix.reset(self.pool)
        self.host_pool = BlockPool(self.limits.host_blocks, first=0)
        self.owners: dict[int, Holding] = {}
        self._free_slots = self._all_slots()
        self._free_records = list(range(self.limits.host_records - 1, -1, -1))
        # What the host tier can hold: less than it was to once an allocation has failed.
        self._host_rooms = (self.limits.host_records, self.limits.host_blocks)
        self._untold_releases = self._all_slots() if any(self._generations) else []
        self.moving: list[Holding] = []
        # Of requests that have ended.
        self._kept: list[Holding] = []

    @property
    def has_slot(self) -> bool:
        """Whether a slot is free."""
        return bool(self._free_slots)

    def staying(self) -> list[Holding]:
        """Those who have a slot, or are on their way to one; not those who are on their way to the host."""
        own = [one for one in self.owners.values() if not _is_leaving(one)]
        return own + [one for one in self.moving if one.phase is RequestPhase.OFFLOADED]

    def count_leaving(self) -> int:
        """Blocks that are on their way to the host, and free when they are there."""
        leaving = (one for one in self.moving if _is_leaving(one))
        return sum(self.pool.count_sole(one.block_ids) for one in leaving)

    def first_blocks(self, holding: Holding) -> int:
        """Blocks for the prompt of a request, and the drafts after it."""
        return self.limits.blocks_up_to(holding.request.prompt_len - 1 + self.limits.mtp_step)

    def admit(self, holding: Holding) -> None:
        """Give a waiting request a slot, the prefix that others have left, and the blocks of its prompt."""
        holding.forget_place()
        holding.slot = self._free_slots.pop()
        holding.generation = self._next_generation(holding.slot)
        holding.resumption = self.prefix.resume(holding)
        holding.block_ids += self.pool.allocate(self.first_blocks(holding) - len(holding.block_ids))
        self.owners[holding.slot] = holding
        holding.enter(RequestPhase.PREFILLING)

    def withdraw(self, holding: Holding) -> None:
        """Take back what a request holds, in the midst of its work: it waits, and begins anew."""
        assert holding.transfer is None
        assert not holding.is_in_open_round
        del self.owners[holding.slot]
        self.prefix.leave(holding)
        self._free(Place("slot", holding.slot), holding.block_ids)
        holding.forget_place()
        holding.enter(RequestPhase.WAITING)

    def count_missing(self, holding: Holding, position: int, ahead: int = 0) -> int:
        """Blocks that it still needs so that every position up to `position` can be written, and as many more
        as it may use of those ahead.
        """
        limits = self.limits
        needed = min(limits.blocks_up_to(position) + ahead, limits.worst_case_blocks(holding.request))
        return max(needed - len(holding.block_ids), 0)

    def grow(self, holding: Holding, count: int) -> list[BlockUpdate]:
        """Give a request `count` more blocks; return their entries in the block table."""
        owned = len(holding.block_ids)
        new = self.pool.allocate(count)
        holding.block_ids += new
        return [BlockUpdate(holding.slot, owned + index, block_id) for index, block_id in enumerate(new)]

    def give_back(self, holding: Holding) -> None:
        """End a request and take back what it holds, once nothing is still to touch it."""
        holding.enter(RequestPhase.FINISHED)
        self.owners.pop(holding.slot, None)
        self.prefix.leave(holding)
        self._kept.append(holding)
        self.sweep()

    def sweep(self) -> None:
        """Take back what was kept of ended requests and nothing touches any more."""
        ended = [holding for holding in self._kept if not holding.is_pinned]
        if not ended:
            return
        self._kept = [holding for holding in self._kept if holding.is_pinned]
        for holding in ended:
            if holding.transfer is not None:
                self._free(holding.transfer.target, holding.transfer.target_block_ids)
                self._end_transfer(holding)
            if (place := holding.place) is not None:
                self._free(place, holding.block_ids)
            holding.slot, holding.host_record, holding.block_ids = 0, None, []

    def host_room(self) -> tuple[int, int]:
        """Records and blocks of host memory that are free."""
        records, blocks = self._host_rooms
        used = self.limits.host_records - len(self._free_records)
        return max(records - used, 0), max(blocks - self.host_pool.num_used, 0)

    def offload(self, holding: Holding) -> None:
        """Begin to bring a running request to the host, which has room for it."""
        blocks = self.host_pool.allocate(len(holding.block_ids))
        self._begin_transfer(holding, Place("host", self._free_records.pop()), blocks)

    def resume(self, holding: Holding) -> None:
        """Begin to bring an offloaded request back, for which a slot and blocks are free."""
        blocks = self.pool.allocate(len(holding.block_ids))
        self._begin_transfer(holding, Place("slot", self._free_slots.pop()), blocks)

    def plan_copy(self, holding: Holding, copy_id: int) -> tuple[Copy, list[BlockUpdate]]:
        """The copy of a transfer whose request has left the plans, and its new slot's block-table row."""
        transfer = holding.transfer
        assert transfer is not None
        assert transfer.copy_id is None, "a copy is planned once"
        transfer.copy_id = copy_id
        pairs = tuple(zip(holding.block_ids, transfer.target_block_ids, strict=True))
        return Copy(copy_id, transfer.source, transfer.target, pairs), self._target_row(holding)

    def finish_transfer(self, holding: Holding) -> None:
        """The copy of a transfer is complete: its target is where the request stands, its source is free."""
        transfer = self._end_transfer(holding)
        if holding.phase is RequestPhase.FINISHED:
            self._free(transfer.target, transfer.target_block_ids)
            self.sweep()
            return
        self.owners.pop(holding.slot, None)
        self._free(transfer.source, holding.block_ids)
        holding.block_ids = transfer.target_block_ids
        if transfer.target.tier == "host":
            holding.slot, holding.host_record = 0, transfer.target.number
            holding.enter(RequestPhase.OFFLOADED)
            return
        holding.slot, holding.host_record = transfer.target.number, None
        holding.generation = transfer.generation
        self.owners[holding.slot] = holding
        holding.enter(RequestPhase.RUNNING)

    def cancel_copies(self, copy_ids: Collection[int]) -> list[Holding]:
        """Host memory could not be had for these copies: their requests, which are returned, stay where they
        are, and the tier is as large as what it holds.
        """
        failed = [(h, h.transfer) for h in self.moving if h.transfer and h.transfer.copy_id in copy_ids]
        for holding, transfer in failed:
            self._end_transfer(holding)
            self._free(transfer.target, transfer.target_block_ids)
        if failed:
            used = self.limits.host_records - len(self._free_records)
            self._host_rooms = (used, self.host_pool.num_used)
        self.sweep()
        return [holding for holding, _ in failed]

    def drop_copies(self, copy_ids: Collection[int]) -> list[Holding]:
        """The plan of these copies was lost: they are not under way. Return whose they are and live."""
        lost = [(h, h.transfer) for h in self.moving if h.transfer and h.transfer.copy_id in copy_ids]
        for _, transfer in lost:
            transfer.copy_id = None
        self.sweep()
        return [holding for holding, _ in lost if holding.phase is not RequestPhase.FINISHED]

    def take_releases(self) -> list[Release]:
        """The slots taken back since the device was told last."""
        slots, self._untold_releases = self._untold_releases, []
        return [Release(slot) for slot in slots]

    def forget_what_was_told(self, next_copy_ids: Collection[int]) -> None:
        """A plan was lost: slots that are free, or of which the device knows no owner, are released again,
        the targets of the copies that the next plan brings among them.
        """
        told = {holding.slot for holding in (*self.owners.values(), *self._kept) if holding.is_told}
        told |= {t.target.number for _, t in self._copied_to_slots() if t.copy_id not in next_copy_ids}
        self._untold_releases = [slot for slot in self._all_slots() if slot not in told]

    def all_block_updates(self) -> list[BlockUpdate]:
        """The block-table entries of everybody whose slot the device knows, or who is being copied to one."""
        told = [holding for holding in self.owners.values() if holding.is_told]
        entries = [block_table_row(holding.slot, holding.block_ids) for holding in told]
        entries += [self._target_row(holding) for holding, _ in self._copied_to_slots()]
        return [entry for row in entries for entry in row]

    def check_integrity(self, live: Collection[Holding]) -> None:
        """Raise AssertionError unless every slot, block and record is free or owned once, and the phase of
        each of the `live` requests agrees with what it holds.
        """
        everyone = {id(holding): holding for holding in (*live, *self._kept)}.values()
        transfers = [holding.transfer for holding in everyone if holding.transfer is not None]
        for holding in everyone:
            self._check_holding(holding)
        tiers = (
            ("slot", self.pool, self._free_slots, list(range(1, len(self._generations)))),
            ("host", self.host_pool, self._free_records, list(range(self.limits.host_records))),
        )
        for tier, pool, free, numbers in tiers:
            places = [(place, h.block_ids) for h in everyone if (place := h.place) is not None]
            places += [(transfer.target, transfer.target_block_ids) for transfer in transfers]
            owned = [(place.number, blocks) for place, blocks in places if place.tier == tier]
            got = sorted([*free, *(number for number, _ in owned)])
            assert got == numbers, f"{tier} numbers must be free or owned once, got {got}"
            pool.check_integrity(block_id for _, blocks in owned for block_id in blocks)
        self.prefix.check_integrity()
        assert {id(h) for h in self.owners.values()} == {id(h) for h in live if h.slot}
        assert [id(h) for h in self.moving] == [id(h) for h in self.moving if h.transfer is not None]
        assert len(self.moving) == len(transfers)

    def _check_holding(self, holding: Holding) -> None:
        phase, has_slot, has_record = holding.phase, holding.slot > 0, holding.host_record is not None
        if phase is RequestPhase.FINISHED:
            assert holding.is_pinned, "a request that has ended holds something"
        elif phase is RequestPhase.WAITING:
            assert (holding.place, holding.block_ids, holding.is_told) == (None, [], False)
            known = () if holding.replay is None else holding.replay.known
            assert tuple(known) == tuple(holding.request.output_token_ids), "told tokens are forgotten"
        else:
            is_offloaded = phase is RequestPhase.OFFLOADED
            assert (has_slot, has_record) == (not is_offloaded, is_offloaded), f"{phase} agrees with no place"
        if has_slot and phase is not RequestPhase.FINISHED:
            assert self.owners[holding.slot] is holding
            assert holding.generation == self._generations[holding.slot], "an owner of a slot is out of date"

    def _begin_transfer(self, holding: Holding, target: Place, blocks: list[int]) -> None:
        assert holding.place is not None
        assert holding.transfer is None, "a request is moved twice at once"
        generation = self._next_generation(target.number) if target.tier == "slot" else 0
        holding.transfer = Transfer(holding.place, target, generation, blocks)
        self.moving.append(holding)

    def _end_transfer(self, holding: Holding) -> Transfer:
        transfer = holding.transfer
        assert transfer is not None, "there is no transfer to end"
        self.moving.remove(holding)
        holding.transfer = None
        return transfer

    def _copied_to_slots(self) -> list[tuple[Holding, Transfer]]:
        copied = [(h, h.transfer) for h in self.moving if h.transfer is not None]
        return [(h, t) for h, t in copied if t.copy_id is not None and t.target.tier == "slot"]

    def _target_row(self, holding: Holding) -> list[BlockUpdate]:
        transfer = holding.transfer
        assert transfer is not None
        if transfer.target.tier == "host":
            return []
        return block_table_row(transfer.target.number, transfer.target_block_ids)

    def _free(self, place: Place, block_ids: Iterable[int]) -> None:
        if place.tier == "host":
            self._free_records.append(place.number)
            self.host_pool.free(block_ids)
        else:
            self._free_slots.append(place.number)
            self._untold_releases.append(place.number)
            self.pool.free(block_ids)

    def _next_generation(self, slot: int) -> int:
        self._generations[slot] += 1
        return self._generations[slot]

    def _all_slots(self) -> list[int]:
        return list(range(len(self._generations) - 1, 0, -1))


def _is_leaving(holding: Holding) -> bool:
    return holding.transfer is not None and holding.transfer.target.tier == "host"


def block_table_row(slot: int, block_ids: Iterable[int]) -> list[BlockUpdate]:
    """The entries of a slot that has these blocks."""
    return [BlockUpdate(slot, column, block_id) for column, block_id in enumerate(block_ids)]
