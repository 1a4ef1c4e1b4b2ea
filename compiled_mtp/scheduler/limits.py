"""The scheduler's sizes, and the blocks and lengths that they allow one request."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from compiled_mtp.request import Request

_LEAST = {
    "max_model_len": 2,
    "mtp_step": 0,
    "max_drafts": 0,
    "max_in_flight": 0,
    "host_records": 0,
    "host_blocks": 0,
    "num_snapshots": 0,
    "prefix_step": 0,
    "busy_chunk": 0,
    "least_saved": 0,
    "prefix_host_records": 0,
    "prefix_host_blocks": 0,
    "wide_requests": 0,
    "wide_drafts": 0,
    "has_lookup": 0,
}


@dataclass(frozen=True, slots=True)
class TowerCost:
    """How much of the vision tower a launch may take: products of `most` weights and rows.

    depth: the tower's layers. patches: the patches of a token; part_patches: the most that a part of a layer
    turns to all others. per_patch, per_pair: products of a layer for each patch, and for each pair of
    patches.
    """

    depth: int
    patches: int
    part_patches: int
    per_patch: int
    per_pair: int
    most: int

    def count_parts(self, num_tokens: int) -> int:
        """Return the parts of all layers for an image of num_tokens tokens."""
        return self.depth * self._layer_parts(num_tokens)

    def slice_parts(self, num_tokens: int) -> int:
        """Return the parts of a slice for an image of num_tokens tokens; slices are about equally long."""
        patches, count = num_tokens * self.patches, self.count_parts(num_tokens)
        layer = patches * (self.per_patch + patches * self.per_pair)
        most = max(self.most * self._layer_parts(num_tokens) // layer, 1)
        num_slices = -(-count // most)
        return -(-count // num_slices)

    def count_slices(self, num_tokens: int) -> int:
        """Return the slices of an image of num_tokens tokens."""
        return -(-self.count_parts(num_tokens) // self.slice_parts(num_tokens))

    def _layer_parts(self, num_tokens: int) -> int:
        return -(-num_tokens * self.patches // self.part_patches)


@dataclass(frozen=True, slots=True)
class Limits:
    """The numbers of slots, blocks, records and snapshots, and the lengths in tokens that bound a request.

    Slots are 1 to max_batch and blocks 1 to num_blocks - 1; host records and host blocks count from 0.
    mtp_step: the most drafts that a chain leaves; max_drafts: the most that a round verifies, at least
    mtp_step. prefill_chunk: the most tokens of a prefill launch; busy_chunk: the same while rounds wait, 0
    for prefill_chunk. prefix_step: a prompt may resume at multiples of this number, 0 for multiples of
    prefill_chunk. least_saved: the fewest tokens that a snapshot near a prompt's end must save when the same
    prompt comes again. max_prompt_chunks: the most prompts of a launch; prompt_lengths: the rows that their
    programs have, ascending, () for programs of any number. num_snapshots: state snapshots of the prefix
    cache, 0 for no cache; prefix_host_records, prefix_host_blocks: the records and blocks of its host tier.
    has_lookup: drafts are looked up in the text too; wide_requests: the most requests of a round that
    verifies wide_drafts of them. given: the drafts that a round of given tokens may verify, ascending, each
    with the most requests of such a round. tower: the cost of images, None for none. longest: the most tokens
    of a request, prompt and output, that max_model_len allows and all blocks hold. Any thread may use it.
    Raises ValueError for a number that is too small, and unless blocks divide prefix_step and prefix_step
    divides the chunks.
    """

    max_batch: int
    num_blocks: int
    block_size: int
    max_model_len: int
    prefill_chunk: int
    mtp_step: int
    max_drafts: int
    max_in_flight: int
    host_records: int = 0
    host_blocks: int = 0
    num_snapshots: int = 0
    prefix_host_records: int = 0
    prefix_host_blocks: int = 0
    prefix_step: int = 0
    busy_chunk: int = 0
    least_saved: int = 0
    max_prompt_chunks: int = 1
    prompt_lengths: tuple[int, ...] = ()
    wide_requests: int = 0
    wide_drafts: int = 0
    has_lookup: bool = False
    given: tuple[tuple[int, int], ...] = ()
    tower: TowerCost | None = None
    longest: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        for each in fields(self):
            value, low = getattr(self, each.name), _LEAST.get(each.name, 1)
            if each.name not in ("given", "tower", "longest", "prompt_lengths") and value < low:
                raise ValueError(f"{each.name} must be at least {low}, got {value}; raise it")
        if self.max_drafts < self.mtp_step:
            raise ValueError(
                f"max_drafts must be at least mtp_step={self.mtp_step}, got {self.max_drafts}; raise it"
            )
        if self.num_snapshots and self.prefill_chunk % self.block_size:
            raise ValueError(
                f"prefill_chunk must be a multiple of block_size={self.block_size} with a prefix cache, got "
                f"{self.prefill_chunk}; change one of the two"
            )
        chunks = (self.prefill_chunk, self.busy_chunk)
        if self.prefix_step % self.block_size or any(chunk % self.resume_step for chunk in chunks):
            raise ValueError(
                f"prefix_step must be a multiple of block_size={self.block_size} that divides chunks of "
                f"{list(chunks)}, got {self.prefix_step}; change one of them"
            )
        longest = min(self.max_model_len, (self.num_blocks - 1) * self.block_size)
        object.__setattr__(self, "longest", longest)

    def fit(self, request: Request) -> None:
        """Set the request's max_output, length_reason, mtp_step and max_drafts.

        Raises ValueError if its prompt and one token do not fit into all blocks. The request processor has
        checked max_model_len.
        """
        prompt_len = request.prompt_len
        pool = f"{self.num_blocks - 1} blocks of {self.block_size} tokens"
        if prompt_len >= self.longest:
            raise ValueError(
                f"prompt and a token must fit into {pool}, got a prompt of {prompt_len}; shorten it or raise "
                "num_blocks"
            )
        room = self.longest - prompt_len
        request.max_output = min(request.params.max_tokens, room)
        is_cut = room < min(request.params.max_tokens, self.max_model_len - prompt_len)
        request.length_reason = f"{pool} hold no more of it; raise num_blocks" if is_cut else None
        request.history.mtp_step, request.history.max_drafts = self.mtp_step, self.max_drafts
        if len(request.forced_ids) > request.max_output:
            raise ValueError(
                f"prompt and continuation must have at most {self.longest} tokens, got {prompt_len} and "
                f"{len(request.forced_ids)}; shorten one, or raise max_model_len or num_blocks"
            )

    @property
    def resume_step(self) -> int:
        """Tokens at whose multiples a prompt may resume."""
        return self.prefix_step or self.prefill_chunk

    def most_drafts(self, num_requests: int) -> int:
        """Return the most drafts that a round of num_requests verifies."""
        wide = self.wide_drafts if num_requests <= self.wide_requests else 0
        return max(self.mtp_step, wide, *(drafts for drafts, most in self.given if num_requests <= most))

    def worst_case_blocks(self, request: Request) -> int:
        """Return the blocks for every position that any launch of this request may write.

        The planner counts one token for each unread round and plans another while the request may lack one
        token. Each unread round may have emitted max_drafts more. The planned one verifies as many, and its
        chain writes mtp_step positions after them.
        """
        drafts = (self.max_in_flight + 1) * self.max_drafts + self.mtp_step
        last = request.prompt_len + max(request.max_output - 2, 0) + drafts
        return self.blocks_up_to(last)

    def blocks_up_to(self, position: int) -> int:
        """Return the blocks for positions 0 to `position`; no launch writes at or beyond `longest`."""
        return min(position, self.longest - 1) // self.block_size + 1
