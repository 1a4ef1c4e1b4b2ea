"""What the scheduler and the runner exchange: one plan per launch, one result per plan. No torch.

A plan names everything that a launch needs, and a result everything that it gave. Plans are frozen: the
scheduler keeps those whose results are due and compares them by identity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from compiled_mtp.graphs.buckets import NO_DRAFTS, RoundShape

# Makes a named tuple in a third of the time of its class; for tuples made for each request and step.
new_tuple = tuple.__new__

SPARE_SLOTS = 2
"""Slots that no request owns: the first, for padding, and the last, in which a launch leaves the state at a
snapshot position inside a prompt chunk."""

PlanKind: TypeAlias = Literal["encode", "prefill", "first", "decode", "verify", "accept", "move"]


class Location(NamedTuple):
    """Where rows are. A request's rows are in a slot on the device ("slot") or in a host record ("host"); the
    rows of a prompt's state are in a state snapshot on the device ("snapshot") or in a record of the prefix
    cache's host tier ("prefix_host").
    """

    tier: Literal["slot", "snapshot", "host", "prefix_host"]
    number: int


@dataclass(frozen=True, slots=True)
class SlotSampling:
    """How the tokens of a slot are drawn; the defaults ask for nothing.

    top_k and min_p are off at 0, top_p at 1. bias: pairs (id, added logit). allowed_ids: None for all.
    stop_ids: at most 64 that cannot be drawn for positions below min_position. bad_words: at most 64 of 1 to
    16 ids, of which the last is not drawn when the others were just emitted. prompt_ids: the prompt, which
    counts for the repetition penalty and may be left out without one. Positions are absolute. forced_ids: the
    first output tokens, from forced_position on, in the place of drawn ones.
    """

    seed: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()
    allowed_ids: tuple[int, ...] | None = None
    min_position: int = 0
    stop_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    prompt_ids: tuple[int, ...] = ()
    forced_ids: tuple[int, ...] = ()
    forced_position: int = 0


class ImageSpan(NamedTuple):
    """The tokens of an image in a prompt, row by row: start, start + 1, ..., rows * columns in all."""

    start: int
    rows: int
    columns: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the image."""
        return self.rows * self.columns

    @property
    def end(self) -> int:
        """The index of the token after the image."""
        return self.start + self.num_tokens

    @property
    def extent(self) -> int:
        """By how much the image advances the rotary position of the text after it."""
        return max(self.rows, self.columns)


class EncodeSlice(NamedTuple):
    """Parts first_part to end_part of the vision tower's layers for one image of a slot's prompt.

    image: its number in the prompt. is_last: these are the last parts, and leave the image's features.
    pixels: RGB bytes, row by row, in the slice with part 0; else empty.
    """

    image: int
    span: ImageSpan
    first_part: int
    end_part: int
    is_last: bool
    pixels: bytes = b""


@dataclass(frozen=True, slots=True)
class Admit:
    """Give a slot to a request: registered rows take their initial values, and `sampling` is written.

    A request that resumes after a cached prefix starts its slot in this way too. text: the prompt's ids, in
    which drafts are looked up; empty without lookup. rotary_delta: the rotary position of a generated token
    minus its index, 0 without images, else at most 0.
    """

    slot: int
    sampling: SlotSampling
    text: tuple[int, ...] = ()
    rotary_delta: int = 0


@dataclass(frozen=True, slots=True)
class Release:
    """Take a slot back: its block-table row becomes -1, so that no launch writes through it."""

    slot: int


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy every registered row of a request, and blocks, from one location to another.

    A state snapshot, and a record of the prefix cache's host tier, hold only the rows that the prompt's next
    chunk reads. blocks: pairs (source block, target block); tiers "slot" and "snapshot" mean blocks of the
    device, "host" and "prefix_host" index blocks of their own. Without has_rows only the blocks are copied,
    and the locations' numbers do not matter. Both locations belong to the copy until a result names copy_id
    in `copies_done`. Copies between slots and state snapshots run in the order of the plans, so that nothing
    waits for them; what goes to the prefix cache's host tier can be read once its copy is done.
    """

    copy_id: int
    source: Location
    target: Location
    blocks: tuple[tuple[int, int], ...] = ()
    has_rows: bool = True


@dataclass(frozen=True, slots=True)
class Draft:
    """Replace the first drafts of a slot's next round by token_ids, at most as many as it verifies."""

    slot: int
    token_ids: tuple[int, ...]


Move: TypeAlias = Admit | Release | Copy | Draft
"""A change before a launch; `cache.moves` carries moves out in the order of the plan."""


class BlockUpdate(NamedTuple):
    """One entry of the block table: block_id at `column` of the slot's row."""

    slot: int
    column: int
    block_id: int


class PromptChunk(NamedTuple):
    """The tokens of one prompt that a launch prefills: token_ids at positions start, start + 1, ... of a
    prompt of prompt_len tokens.

    is_last: the prompt ends here, and the launch emits its first token too. snapshot_offset: after this
    number of the chunk's tokens, a multiple of 64, the launch leaves the state in the last slot, for a state
    snapshot; 0 for none; above 0 in at most one chunk of a launch. next_ids: if the prompt's own log
    probabilities are wanted, the id that follows each of the tokens in the prompt, else empty; such a chunk
    is alone in its launch. images: the prompt's images that begin before the chunk's end; the features of
    images that the chunk touches have been encoded.
    """

    token_ids: tuple[int, ...]
    start: int
    prompt_len: int
    is_last: bool = False
    next_ids: tuple[int, ...] = ()
    snapshot_offset: int = 0
    images: tuple[ImageSpan, ...] = ()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One launch: a slice of the vision tower, prompt chunks, a decode round of several requests or one phase
    of it, or moves alone.

    The runner carries out `moves`, `block_updates`, the launch and `saves`, in this order.
    encode: `encoded`, a slice of the vision tower for an image of the one slot's prompt.
    prefill: `prompt_chunks`, one per slot; those with is_last also emit a first token and leave shape.chain
    drafts.
    first: the first token of one request, and shape.chain drafts, after all chunks of its prompt without
    is_last; for tokens that need a mask or log probabilities.
    decode: every slot is verified on shape.verify + 1 rows, and leaves shape.chain new drafts. num_drafts of
    the verified drafts were drafted; the others are id 0.
    verify, accept: the two phases of such a round; other launches may run in between. verify ends with the
    logits; accept samples, accepts, commits and drafts. Both carry the round's slots and depths. Until accept
    has been planned, no other plan uses those slots and their blocks. A round whose requests have all ended
    in between has no accept.
    move: nothing is launched; the result comes when every copy planned so far is complete.

    logprobs: the most likely ids that a request wants listed, at most 20, or -1 for no log probabilities;
    only first and accept have them. has_processed_logprobs: a request also wants the log probabilities of the
    logits after masks, temperature and filters. is_guided: a grammar masks some rows. wants_drafts: the
    result names the next round's drafts. is_given: the whole output of every request of a first or accept is
    given, so nothing is drafted. saves: copies of the chunks' states to state snapshots; complete when the
    plan's result comes. catches_up: before a decode or verify, the draft model reads the deferred draft
    inputs of the slots.
    """

    step_id: int
    kind: PlanKind
    slots: tuple[int, ...] = ()
    generations: tuple[int, ...] = ()
    shape: RoundShape = NO_DRAFTS
    num_drafts: int = 0
    catches_up: bool = False
    prompt_chunks: tuple[PromptChunk, ...] = ()
    moves: tuple[Move, ...] = ()
    block_updates: tuple[BlockUpdate, ...] = ()
    logprobs: int = -1
    has_processed_logprobs: bool = False
    is_guided: bool = False
    wants_drafts: bool = False
    is_given: bool = False
    saves: tuple[Copy, ...] = ()
    encoded: EncodeSlice | None = None

    @property
    def ended(self) -> list[int]:
        """Indices in `slots` of the requests whose first tokens a prefill emits."""
        return [index for index, prompt_chunk in enumerate(self.prompt_chunks) if prompt_chunk.is_last]

    @property
    def next_ids(self) -> tuple[int, ...]:
        """The next_ids of a prefill of one chunk; empty for other launches."""
        return self.prompt_chunks[0].next_ids if len(self.prompt_chunks) == 1 else ()


class RowLogprobs(NamedTuple):
    """Log probabilities of n tokens, [n], with ranks [n], top ids and their log probabilities [n][20], and
    entropies [n] in nats.

    ranks count from 1, the most likely; of equally likely ids the lowest comes first. top_logprobs is -inf
    where fewer ids can be drawn. processed: the same of the processed logits, if the plan wants them.
    """

    logprobs: Sequence[float]
    ranks: Sequence[int]
    top_ids: Sequence[Sequence[int]]
    top_logprobs: Sequence[Sequence[float]]
    entropies: Sequence[float]
    processed: RowLogprobs | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a launch, with one entry per slot of `plan`, or the error with which it ended.

    token_ids: the tokens that each request gained: [y_0] after the last chunk of a prompt, [] after others.
    not_finite: indices in plan.slots of requests whose next token could not be drawn because its row of
    logits is not finite; token_ids holds the tokens drawn before that row. all_masked: likewise, because
    every id of that row is masked. drafts: the next round's, if the plan wants them, else empty. matches:
    with lookup, the match lengths of the drafts that a round verified and of those that the launch leaves, 0
    for a chain's; else empty. copies_done: ids of complete copies. copies_failed: ids of copies that never
    began because there was no memory for their target. logprobs: the log probabilities of token_ids, if the
    plan wants them, else empty; prompt_logprobs: the log probabilities of plan.next_ids. is_late: the device
    finished at an unknown time before the host read the result, as a CPU always does. device_s: the seconds
    that a round took on a GPU, by its own clock, if the result is late. With an error, none of the plan's
    copies still runs.
    """

    plan: StepPlan
    token_ids: Sequence[list[int]] = ()
    not_finite: tuple[int, ...] = ()
    drafts: Sequence[Sequence[int]] = ()
    copies_done: tuple[int, ...] = ()
    copies_failed: tuple[int, ...] = ()
    error: str | None = None
    all_masked: tuple[int, ...] = ()
    logprobs: Sequence[RowLogprobs] = ()
    prompt_logprobs: RowLogprobs | None = None
    is_late: bool = False
    device_s: float | None = None
    matches: Sequence[Sequence[int]] = ()
