"""The prefix cache as requests use it: where a prompt resumes, and what it leaves for others. No torch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from compiled_mtp.cache.block_pool import BlockPool
from compiled_mtp.cache.prefix_host_tier import HostEntry, PrefixHostTier
from compiled_mtp.cache.prefix_index import LONGEST_LIFE, Chunk, PrefixIndex, chain_key, root_key
from compiled_mtp.plan import Location
from compiled_mtp.scheduler.limits import Limits
from compiled_mtp.scheduler.phases import RequestPhase
from compiled_mtp.scheduler.scheduled_request import Resumption, ScheduledRequest

# A prompt with this many tokens in common with one that is being entered waits for that, even where no state
# snapshot is expected.
_LEAST_AWAITED = 512


@dataclass(slots=True)
class _PendingInsert:
    """A prompt that is admitted and not entered in the index yet.

    keys: of its whole chunks. resume_end: the number of the chunk after which the same prompt would resume.
    branch: the number of the last cached chunk before it parts from another prompt, 0 for none. chunks: its
    chunks that have a state snapshot. entries: the entries of the host tier that its first launch reads.
    """

    keys: list[bytes]
    resume_end: int
    branch: int
    chunks: list[Chunk] = field(default_factory=list)
    entries: list[HostEntry] = field(default_factory=list)


class PrefixCache:
    """Lets requests resume after cached prefixes of earlier prompts, and caches their own chunks.

    A prompt resumes after the last of its whole chunks that has a state snapshot and leaves at least one
    token to prefill. Its own chunks can be found once its first token was drawn from finite logits, which
    depend on all of them; a request that ends earlier caches nothing. What the device evicts goes to
    `prefix_host` in host memory, and is read from there. Without state snapshots the cache does nothing.
    num_lookups counts requests of at least one whole chunk, num_hits the ones that resumed, and num_host_hits
    the ones that resumed from the host tier.
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
        # The last request of `count_shared`, the index's version then, and the result: admission asks about
        # the first waiting request at every step, and a long prompt has thousands of chunks.
        self._counted: tuple[ScheduledRequest, tuple[int, int], int] | None = None

    def reset(self, pool: BlockPool) -> None:
        """Forget all chunks and requests; cache in the blocks of `pool` from now on."""
        self.index.reset(pool)
        self.prefix_host.reset()
        self._pending.clear()
        self._counted = None

    def resume(self, scheduled: ScheduledRequest) -> Resumption | None:
        """Give a request without blocks the device blocks of the prefix after which it resumes.

        The caller allocates blocks for the part of the prefix that the host tier holds. Returns what fills
        the slot before the first launch; None if the prompt begins at position 0. Mutates block_ids and
        num_prefilled, and the request's cached_tokens.
        """
        assert not scheduled.block_ids
        self._counted = None
        request, is_first = scheduled.request, scheduled.replay is None
        # A request that is preempted before its first token resumes twice and counts once.
        is_counted, scheduled.is_looked_up = scheduled.is_looked_up, True
        if is_first:
            request.history.cached_tokens = 0
        keys = self._keys_of(scheduled)
        if not keys:
            return None
        known = self.index.match(keys)
        resume_end = (request.prompt_len - 1) // self.chunk
        has_branch = bool(known) and len(known) < len(keys) and known[-1].num_children > 0
        self._pending[scheduled] = pending = _PendingInsert(keys, resume_end, len(known) if has_branch else 0)
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
            return Resumption(Location("snapshot", path[-1].snapshot))
        return self._fetch(pending, end, len(path))

    def _last_end(self, path: Sequence[Chunk], keys: Sequence[bytes]) -> int:
        """Return the number of the last chunk after which a prompt of these keys can resume, 0 for none.

        path: the chunks of the prompt that the device holds.
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
        """Return what the host tier provides: the state after chunk `end`, and the blocks after `num_shared`.

        The state gets a snapshot on the device again if one is free or expires sooner.
        """
        prefix_host, clock, keys = self.prefix_host, self.index.clock, pending.keys
        state = prefix_host.hold(keys[end - 1], end, clock + LONGEST_LIFE, clock, is_state=True)
        blocks = [
            prefix_host.hold(keys[number - 1], number, 0, clock, is_state=False)
            for number in range(num_shared + 1, end + 1)
        ]
        pending.entries = [state, *blocks]
        chunk = Chunk(keys[end - 1], end, is_resume_point=True)
        if self.index.assign_snapshot(chunk):
            pending.chunks.append(chunk)
        (record,) = state.rows
        prefix_host_blocks = tuple(block_id for entry in blocks for block_id in entry.rows)
        return Resumption(Location("prefix_host", record), prefix_host_blocks, chunk.snapshot)

    def begin(self, scheduled: ScheduledRequest) -> None:
        """Release the host entries that a resuming request reads: its first launch is planned."""
        pending = self._pending[scheduled]
        self.prefix_host.release(pending.entries)
        pending.entries = []

    def is_expected(self, scheduled: ScheduledRequest) -> bool:
        """Whether a prompt with the same beginning waits only for the result of its first token to be
        entered.

        A request that waits for that shares the prefix, or at least knows where the two prompts part.
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
        """Whether a prompt that is being prefilled shares more of this prompt than the cache holds.

        After it, this prompt may resume later, or at least knows where the two part.
        """
        keys = self._keys_of(scheduled)
        here = len(self._known(keys))
        return here < len(keys) and any(
            one.phase is RequestPhase.PREFILLING and pending.keys[here : here + 1] == [keys[here]]
            for one, pending in self._pending.items()
        )

    def predict_start(self, scheduled: ScheduledRequest) -> int:
        """Return the position at which its prefill would begin if it were admitted now."""
        keys, request = self._keys_of(scheduled), scheduled.request
        if request.wants_prompt_logprobs:
            return 0
        resume_end = (request.prompt_len - 1) // self.chunk
        return self._last_end(self._known(keys)[:resume_end], keys[:resume_end]) * self.chunk

    def _known(self, keys: Sequence[bytes]) -> list[Chunk]:
        """Return the chunks on the device with which a prompt of these keys begins."""
        found = (self.index.find(key) for key in keys)
        return [chunk for chunk in itertools.takewhile(lambda chunk: chunk is not None, found) if chunk]

    def count_shared(self, scheduled: ScheduledRequest) -> int:
        """Return how many blocks of its cached prefix other requests already hold."""
        version = self.index.version
        if scheduled.request.wants_prompt_logprobs:
            return 0
        if self._counted is not None and self._counted[0] is scheduled and self._counted[1] == version:
            return self._counted[2]
        count = self._count_shared(scheduled)
        self._counted = (scheduled, version, count)
        return count

    def snapshot_positions(self, scheduled: ScheduledRequest, end: int) -> list[int]:
        """Return, ascending, the positions before `end` at which a launch up to `end` must leave a snapshot.

        These are the position where an earlier prompt parts from this one, and the last position at which the
        same prompt could resume, unless that saves fewer than least_saved tokens.
        """
        pending, start = self._pending.get(scheduled), scheduled.num_prefilled
        if pending is None:
            return []
        branch, resume_end = pending.branch * self.chunk, pending.resume_end * self.chunk
        positions = {branch, resume_end if resume_end - start >= self.least_saved else 0}
        return sorted(position for position in positions if start < position < end)

    def take_snapshot(self, scheduled: ScheduledRequest, start: int, position: int) -> int | None:
        """Return the state snapshot for the state at `position`, which a chunk from `start` on leaves.

        None for a position that needs none, or if none is free or expires sooner. At the prompt's end a
        snapshot must save least_saved tokens too.
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
        if not self.index.assign_snapshot(chunk):
            return None
        pending.chunks.append(chunk)
        return chunk.snapshot

    def enter(self, scheduled: ScheduledRequest) -> None:
        """Enter the chunks of a request whose first token was read and which still holds its blocks."""
        pending = self._pending.pop(scheduled, None)
        if pending is not None:
            self.index.enter(pending.keys, scheduled.block_ids, pending.chunks, pending.resume_end)

    def leave(self, scheduled: ScheduledRequest) -> None:
        """Forget the chunks of a request that gives its blocks back, unless they are entered."""
        pending = self._pending.pop(scheduled, None)
        if pending is not None:
            self.index.forget(pending.chunks)
            self.prefix_host.release(pending.entries)

    def check_integrity(self) -> None:
        """Raise AssertionError unless index and host tier are consistent, and snapshots that are not entered
        belong to a pending request.
        """
        self.index.check_integrity([chunk for pending in self._pending.values() for chunk in pending.chunks])
        self.prefix_host.check_integrity(
            [entry for pending in self._pending.values() for entry in pending.entries]
        )
        assert all(scheduled.block_ids for scheduled in self._pending), (
            "a pending insert must belong to a request with blocks"
        )
        if self._counted is not None and self._counted[1] == self.index.version:
            scheduled, _, count = self._counted
            assert self._count_shared(scheduled) == count, "the cached count of shared blocks is out of date"

    def _count_shared(self, scheduled: ScheduledRequest) -> int:
        resume_end = (scheduled.request.prompt_len - 1) // self.chunk
        return self.index.count_shared(self._keys_of(scheduled)[:resume_end])

    def _keys_of(self, scheduled: ScheduledRequest) -> list[bytes]:
        """Return the keys of a prompt's whole chunks, computed once."""
        if scheduled.prefix_keys is None:
            request, before = scheduled.request, root_key(scheduled.request.params.cache_salt)
            keys: list[bytes] = []
            last = request.prompt_len if self.index.num_snapshots else 0
            for end in range(self.chunk, last + 1, self.chunk):
                start = end - self.chunk
                images = [
                    one.span.start.to_bytes(8, "little") + one.digest
                    for one in request.images
                    if one.span.start < end and one.span.end > start
                ]
                before = chain_key(before, request.prompt_token_ids[start:end], images)
                keys.append(before)
            # Set at once: an interrupt must not leave some of the keys in a waiting request.
            scheduled.prefix_keys = keys
        return scheduled.prefix_keys
