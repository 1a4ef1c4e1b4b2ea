"""The prefix cache as requests meet it: where a prompt resumes, and what it leaves behind. No torch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from compiled_mtp.cache.block_pool import BlockPool
from compiled_mtp.cache.prefix_host_tier import Item, PrefixHostTier
from compiled_mtp.cache.prefix_index import LONGEST_LIFE, Chunk, PrefixIndex, chain_key, root_key
from compiled_mtp.plan import Place
from compiled_mtp.scheduler.limits import Limits
from compiled_mtp.scheduler.phases import RequestPhase

if TYPE_CHECKING:
    from compiled_mtp.scheduler.resources import ScheduledRequest


# Common tokens for which a prompt waits until another's can be found, if no checkpoint is expected there.
_LEAST_AWAITED = 512


class Resumption(NamedTuple):
    """What a request begins from: the rows in `source`, a checkpoint or a record of the shelf, and the
    shelf's blocks of the last chunks before; the first are shared. checkpoint: where a state from the shelf
    is to be kept again; None for nowhere.
    """

    source: Place
    prefix_host_blocks: tuple[int, ...] = ()
    snapshot: int | None = None


@dataclass(slots=True)
class _PendingInsert:
    """A prompt on its way through the cache. keys: of its whole chunks; rest: the number of the chunk behind
    which it would resume if it came again; branch: of the last chunk before it leaves a known way, 0 for
    none; chunks: those that have got a checkpoint and are not entered yet; items: what its first launch is to
    be given from the shelf.
    """

    keys: list[bytes]
    resume_end: int
    branch: int
    chunks: list[Chunk] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)


class PrefixCache:
    """Lets requests begin behind what earlier prompts have left, and takes what they leave.

    A prompt resumes at the largest end of a whole chunk that has a checkpoint and leaves one token at least
    to be prefilled. Its own chunks can be found once its first token was drawn from finite logits, which
    depend on all of them: a request that ends before leaves nothing. What the device gives up goes to the
    `prefix_host` in host memory, and comes back from there. Without checkpoints it does nothing. num_hits of
    num_lookups requests of at least one whole chunk have resumed, num_host_hits of them from the shelf.
    """

    def __init__(self, limits: Limits) -> None:
        self.chunk = limits.resume_step
        self.least_saved = limits.least_saved
        self.prefix_host = PrefixHostTier(limits.prefix_host_records, limits.prefix_host_blocks)
        blocks_per_chunk = self.chunk // limits.block_size
        self.index = PrefixIndex(limits.num_snapshots, blocks_per_chunk, self.prefix_host)
        self.num_lookups = 0
        self.num_hits = 0
        self.num_host_hits = 0
        self._pending: dict[ScheduledRequest, _PendingInsert] = {}
        # Who was asked about last, the index's version then, and the answer: whoever is next in line is asked
        # about at every step, and a long prompt has thousands of chunks.
        self._counted: tuple[ScheduledRequest, tuple[int, int], int] | None = None

    def reset(self, pool: BlockPool) -> None:
        """Forget everything, and every request; from here on over the blocks of `pool`."""
        self.index.reset(pool)
        self.prefix_host.reset()
        self._pending.clear()
        self._counted = None

    def resume(self, scheduled: ScheduledRequest) -> Resumption | None:
        """A request that holds no blocks begins: give it those of the prefix behind which it resumes, as far
        as the device has them; room for the others is to be made.

        Returns what its first launch is to be given; None if it begins at position 0. Mutates its block_ids
        and num_prefilled, and the request's cached_tokens.
        """
        assert not scheduled.block_ids
        self._counted = None
        request, is_first = scheduled.request, scheduled.replay is None
        # Whoever loses its place before its first token begins twice.
        is_counted, scheduled.is_looked_up = scheduled.is_looked_up, True
        if is_first:
            request.history.cached_tokens = 0
        keys = self._keys_of(scheduled)
        if not keys:
            return None
        known = self.index.match(keys)
        resume_end = (request.prompt_len - 1) // self.chunk
        leaves_a_way = bool(known) and len(known) < len(keys) and known[-1].num_children > 0
        self._pending[scheduled] = pending = _PendingInsert(
            keys, resume_end, len(known) if leaves_a_way else 0
        )
        if request.wants_prompt_logprobs:
            return None
        self.num_lookups += not is_counted
        end = self._last_end(known[:resume_end], keys[:resume_end])
        if not end:
            return None
        path = known[:end]
        scheduled.block_ids = self.index.use(path)
        scheduled.num_prefilled = end * self.chunk
        if len(path) == end:
            path[-1].is_resume_point = True
        is_from_device = len(path) == end and path[-1].snapshot is not None
        if is_first:
            request.history.cached_tokens = scheduled.num_prefilled
        if not is_counted:
            self.num_hits += 1
            self.num_host_hits += not is_from_device
        if is_from_device:
            assert path[-1].snapshot is not None
            return Resumption(Place("snapshot", path[-1].snapshot))
        return self._fetch(pending, end, len(path))

    def _last_end(self, path: Sequence[Chunk], keys: Sequence[bytes]) -> int:
        """The number of the last chunk behind which a prompt of these keys can resume, 0 for none; `path` are
        those of its chunks that the device has.
        """
        prefix_host, reach = self.prefix_host, len(path)
        while reach < len(keys) and prefix_host.has_blocks(keys[reach]):
            reach += 1
        for number in range(reach, 0, -1):
            is_here = number <= len(path) and path[number - 1].snapshot is not None
            if is_here or prefix_host.has_state(keys[number - 1]):
                return number
        return 0

    def _fetch(self, pending: _PendingInsert, end: int, num_shared: int) -> Resumption:
        """What is to come from the shelf: the state behind chunk `end`, and blocks from num_shared on.

        The state is kept on the device again, where it is worth it.
        """
        prefix_host, clock, keys = self.prefix_host, self.index.clock, pending.keys
        state = prefix_host.hold(keys[end - 1], end, clock + LONGEST_LIFE, clock, is_state=True)
        blocks = [
            prefix_host.hold(keys[number - 1], number, 0, clock, is_state=False)
            for number in range(num_shared + 1, end + 1)
        ]
        pending.items = [state, *blocks]
        chunk = Chunk(keys[end - 1], end, is_resume_point=True)
        if self.index.take_place(chunk):
            pending.chunks.append(chunk)
        (record,) = state.places
        prefix_host_blocks = tuple(block_id for item in blocks for block_id in item.places)
        return Resumption(Place("prefix_host", record), prefix_host_blocks, chunk.snapshot)

    def begin(self, scheduled: ScheduledRequest) -> None:
        """The first launch of a request that resumes is planned: it is given what it was to be given."""
        pending = self._pending[scheduled]
        self.prefix_host.release(pending.items)
        pending.items = []

    def is_expected(self, scheduled: ScheduledRequest) -> bool:
        """Whether a prompt that begins as this one does has been computed, and is entered once its first
        token is read: whoever waits for that shares it, or at least learns where the two part.
        """
        keys, many = self._keys_of(scheduled), max(_LEAST_AWAITED // self.chunk, 1)
        return bool(keys) and any(
            one.is_first_token_due
            and self.index.find(pending.keys[-1]) is None
            and (
                pending.keys[many - 1 : many] == keys[many - 1 : many] != []
                or any(keys[chunk.number - 1 : chunk.number] == [chunk.key] for chunk in pending.chunks)
            )
            for one, pending in self._pending.items()
        )

    def is_coming(self, scheduled: ScheduledRequest) -> bool:
        """Whether a prompt that is on its way begins as this one does, with more than the cache has: one of
        the two would learn from the other where they part, or begin there.
        """
        keys = self._keys_of(scheduled)
        here = len(self._known(keys))
        return here < len(keys) and any(
            one.phase is RequestPhase.PREFILLING and pending.keys[here : here + 1] == [keys[here]]
            for one, pending in self._pending.items()
        )

    def foresee(self, scheduled: ScheduledRequest) -> int:
        """The position at which it would begin now."""
        keys, request = self._keys_of(scheduled), scheduled.request
        if request.wants_prompt_logprobs:
            return 0
        resume_end = (request.prompt_len - 1) // self.chunk
        return self._last_end(self._known(keys)[:resume_end], keys[:resume_end]) * self.chunk

    def _known(self, keys: Sequence[bytes]) -> list[Chunk]:
        """The chunks of the device that a prompt of these keys begins with."""
        found = (self.index.find(key) for key in keys)
        return [chunk for chunk in itertools.takewhile(lambda chunk: chunk is not None, found) if chunk]

    def count_shared(self, scheduled: ScheduledRequest) -> int:
        """Blocks of its prefix that it would share with requests that have a place."""
        version = self.index.version
        if scheduled.request.wants_prompt_logprobs:
            return 0
        if self._counted is not None and self._counted[0] is scheduled and self._counted[1] == version:
            return self._counted[2]
        count = self._count_shared(scheduled)
        self._counted = (scheduled, version, count)
        return count

    def places(self, scheduled: ScheduledRequest, end: int) -> list[int]:
        """The positions before `end`, in their order, at which a launch that goes on to there is to leave a
        checkpoint: where an earlier prompt parted from this one, and the last place where this one could
        resume if it came again, unless that saves too little."""
        pending, start = self._pending.get(scheduled), scheduled.num_prefilled
        if pending is None:
            return []
        branch, resume_end = pending.branch * self.chunk, pending.resume_end * self.chunk
        places = {branch, resume_end if resume_end - start >= self.least_saved else 0}
        return sorted(place for place in places if start < place < end)

    def take_snapshot(self, scheduled: ScheduledRequest, start: int, position: int) -> int | None:
        """Where the state at a position is to be copied which a piece leaves that is planned now, and begins
        at `start`; None: nowhere. At the prompt's end too only if that saves enough.
        """
        pending, (number, tail) = self._pending.get(scheduled), divmod(position, self.chunk)
        if pending is None or tail:
            return None
        if position == scheduled.request.prompt_len:
            resume_end = pending.resume_end * self.chunk
            before = resume_end if resume_end - start >= self.least_saved else start
            if position - before < self.least_saved:
                return None
        key = pending.keys[number - 1]
        known = self.index.find(key)
        if known is not None and known.snapshot is not None:
            return None
        chunk = Chunk(
            key, number, is_resume_point=number in (pending.resume_end, pending.branch, len(pending.keys))
        )
        if not self.index.take_place(chunk):
            return None
        pending.chunks.append(chunk)
        return chunk.snapshot

    def enter(self, scheduled: ScheduledRequest) -> None:
        """The first token of a request has been read, and it still holds its blocks."""
        pending = self._pending.pop(scheduled, None)
        if pending is not None:
            self.index.enter(pending.keys, scheduled.block_ids, pending.chunks, pending.resume_end)

    def leave(self, scheduled: ScheduledRequest) -> None:
        """A request gives its blocks back: what is not entered will not be."""
        pending = self._pending.pop(scheduled, None)
        if pending is not None:
            self.index.forget(pending.chunks)
            self.prefix_host.release(pending.items)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the index is sound, and checkpoints that are not entered belong to a
        request on its way.
        """
        self.index.check_integrity([chunk for pending in self._pending.values() for chunk in pending.chunks])
        self.prefix_host.check_integrity(
            [item for pending in self._pending.values() for item in pending.items]
        )
        assert all(scheduled.block_ids for scheduled in self._pending), (
            "a trail of a request that holds nothing"
        )
        if self._counted is not None and self._counted[1] == self.index.version:
            scheduled, _, count = self._counted
            assert self._count_shared(scheduled) == count, "what others hold of a prefix is not what it was"

    def _count_shared(self, scheduled: ScheduledRequest) -> int:
        resume_end = (scheduled.request.prompt_len - 1) // self.chunk
        return self.index.count_shared(self._keys_of(scheduled)[:resume_end])

    def _keys_of(self, scheduled: ScheduledRequest) -> list[bytes]:
        """The keys of a prompt's whole chunks, computed once."""
        if scheduled.prefix_keys is None:
            request, before = scheduled.request, root_key(scheduled.request.params.cache_salt)
            keys: list[bytes] = []
            last = request.prompt_len if self.index.num_snapshots else 0
            for end in range(self.chunk, last + 1, self.chunk):
                before = chain_key(before, request.prompt_token_ids[end - self.chunk : end])
                keys.append(before)
            # All at once: who waits keeps them, also where the step that makes them is interrupted.
            scheduled.prefix_keys = keys
        return scheduled.prefix_keys
