"""The prefix cache as requests meet it: where a prompt resumes, and what it leaves behind. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from compiled_mtp.cache.block_pool import BlockPool
from compiled_mtp.cache.prefix_index import Chunk, PrefixIndex, chain_key, root_key
from compiled_mtp.scheduler.limits import Limits

if TYPE_CHECKING:
    from compiled_mtp.scheduler.holdings import Holding


@dataclass(slots=True)
class _Trail:
    """A prompt on its way through the cache. keys: of its whole chunks; rest: the number of the chunk behind
    which it would resume if it came again; branch: of the last chunk before it leaves a known way, 0 for
    none; chunks: those that have got a checkpoint and are not entered yet.
    """

    keys: list[bytes]
    rest: int
    branch: int
    chunks: list[Chunk] = field(default_factory=list)


class PrefixCache:
    """Lets requests begin behind what earlier prompts have left, and takes what they leave.

    A prompt resumes at the largest end of a whole chunk that has a checkpoint and leaves one token at least
    to be prefilled. Its own chunks can be found once its first token was drawn from finite logits, which
    depend on all of them: a request that ends before leaves nothing. Without checkpoints it does nothing.
    num_hits of num_lookups requests of at least one whole chunk have resumed.
    """

    def __init__(self, limits: Limits) -> None:
        self.chunk = limits.prefill_chunk
        self.index = PrefixIndex(limits.num_checkpoints, limits.prefill_chunk // limits.block_size)
        self.num_lookups = 0
        self.num_hits = 0
        self._trails: dict[Holding, _Trail] = {}

    def reset(self, pool: BlockPool) -> None:
        """Forget everything, and every request; from here on over the blocks of `pool`."""
        self.index.reset(pool)
        self._trails.clear()

    def resume(self, holding: Holding) -> int | None:
        """A request that holds no blocks begins: give it those of the prefix behind which it resumes.

        Returns the checkpoint that its slot is to be filled from; None if it begins at position 0. Mutates
        its block_ids and num_prefilled, and the request's cached_tokens.
        """
        assert not holding.block_ids
        request, is_first = holding.request, holding.replay is None
        if is_first:
            request.history.cached_tokens = 0
        keys = self._keys_of(holding)
        if not keys:
            return None
        known = self.index.match(keys)
        rest = (request.prompt_len - 1) // self.chunk
        leaves_a_way = bool(known) and len(known) < len(keys) and known[-1].num_children > 0
        self._trails[holding] = _Trail(keys, rest, len(known) if leaves_a_way else 0)
        if request.wants_prompt_logprobs:
            return None
        self.num_lookups += is_first
        path = known[:rest]
        while path and path[-1].checkpoint is None:
            path.pop()
        if not path:
            return None
        holding.block_ids = self.index.use(path)
        holding.num_prefilled = len(path) * self.chunk
        if is_first:
            request.history.cached_tokens = holding.num_prefilled
            self.num_hits += 1
        return path[-1].checkpoint

    def is_expected(self, holding: Holding) -> bool:
        """Whether a prompt that begins as this one does has been computed, and is entered once its first
        token is read: whoever waits for that shares it.
        """
        keys = self._keys_of(holding)
        return bool(keys) and any(
            one.is_first_token_due and trail.keys[:1] == keys[:1] and self.index.find(trail.keys[-1]) is None
            for one, trail in self._trails.items()
        )

    def count_held(self, holding: Holding) -> int:
        """Blocks of its prefix that it would share with requests that have a place."""
        request = holding.request
        if request.wants_prompt_logprobs:
            return 0
        return self.index.count_held(self._keys_of(holding)[: (request.prompt_len - 1) // self.chunk])

    def take_checkpoint(self, holding: Holding) -> int | None:
        """Where the state is to be copied that a chunk leaves which is planned now; None: nowhere."""
        trail, (number, tail) = self._trails.get(holding), divmod(holding.num_prefilled, self.chunk)
        if trail is None or tail:
            return None
        key = trail.keys[number - 1]
        known = self.index.find(key)
        if known is not None and known.checkpoint is not None:
            return None
        chunk = Chunk(key, number, is_rest=number in (trail.rest, trail.branch, len(trail.keys)))
        if not self.index.take_place(chunk):
            return None
        trail.chunks.append(chunk)
        return chunk.checkpoint

    def enter(self, holding: Holding) -> None:
        """The first token of a request has been read, and it still holds its blocks."""
        trail = self._trails.pop(holding, None)
        if trail is not None:
            self.index.enter(trail.keys, holding.block_ids, trail.chunks, trail.rest)

    def leave(self, holding: Holding) -> None:
        """A request gives its blocks back: what is not entered will not be."""
        trail = self._trails.pop(holding, None)
        if trail is not None:
            self.index.forget(trail.chunks)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the index is sound, and checkpoints that are not entered belong to a
        request on its way.
        """
        self.index.check_integrity([chunk for trail in self._trails.values() for chunk in trail.chunks])
        assert all(holding.block_ids for holding in self._trails), "a trail of a request that holds nothing"

    def _keys_of(self, holding: Holding) -> list[bytes]:
        """The keys of a prompt's whole chunks, computed once."""
        if holding.prefix_keys is None:
            request, before = holding.request, root_key(holding.request.params.cache_salt)
            holding.prefix_keys = keys = []
            last = request.prompt_len if self.index.num_checkpoints else 0
            for end in range(self.chunk, last + 1, self.chunk):
                before = chain_key(before, request.prompt_token_ids[end - self.chunk : end])
                keys.append(before)
        return holding.prefix_keys
