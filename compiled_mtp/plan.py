"""What the scheduler and the runner tell each other: one plan a launch, one result a plan. No torch.

A plan says everything a launch needs and a result everything that came of it, by name. Plans are frozen:
the scheduler keeps those whose results are due and compares them by identity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from compiled_mtp.graphs.buckets import NO_DRAFTS, RoundShape

SPARE_SLOTS = 2
"""Slots that no request owns: the padding's, the first, and the last, in which a launch leaves what is to be
a checkpoint of a place inside a piece of a prompt."""

PlanKind: TypeAlias = Literal["prefill", "first", "decode", "verify", "accept", "move"]


class Location(NamedTuple):
    """Where the rows of a request lie: in a slot of the device or a host record; where what its prompt has
    left does: in a checkpoint of the device or a record of the host's shelf.
    """

    tier: Literal["slot", "snapshot", "host", "prefix_host"]
    number: int


@dataclass(frozen=True, slots=True)
class SlotSampling:
    """How the tokens of a slot are drawn; the defaults ask for nothing.

    top_k and min_p are off at 0, top_p at 1. bias: pairs (id, added logit). allowed_ids: None for all.
    stop_ids: at most 64 that cannot be drawn for positions below min_position. bad_words: at most 64 of 1 to
    16 ids, of which the last is not drawn when the others were just emitted. prompt_ids: the prompt, which
    counts for the repetition penalty and may be left out without one. Positions are absolute.
    has_processed_logprobs: log probabilities are those of the logits after masks, temperature and filters.
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
    has_processed_logprobs: bool = False


@dataclass(frozen=True, slots=True)
class Admit:
    """Give a slot to a request: its registered rows take their initial values, its sampling these.

    Follows the giving of a slot, not the first chunk of a prompt: a request that resumes behind a cached
    prefix starts its slot too.
    """

    slot: int
    sampling: SlotSampling


@dataclass(frozen=True, slots=True)
class Release:
    """Take a slot back: its block-table row becomes -1, so that nothing writes through it any more."""

    slot: int


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy every registered row of a request, and blocks, from one place to another.

    A checkpoint, and a record of the shelf, have those rows alone that a later chunk of the prompt reads.
    blocks are pairs (source block, target block): "slot" and "checkpoint" stand for blocks of the device, ids
    of "host" and "shelf" index their own. Without has_rows blocks alone are copied, whatever the places'
    numbers. Both places belong to the copy until a result names copy_id in `copies_done`; what is copied to
    and from checkpoints, and the device's slots, happens in the order of the plans and needs no waiting, but
    what goes to the shelf is there when its copy is done.
    """

    copy_id: int
    source: Location
    target: Location
    blocks: tuple[tuple[int, int], ...] = ()
    has_rows: bool = True


@dataclass(frozen=True, slots=True)
class Draft:
    """The first drafts of a slot's next round are these, no more than it verifies, whatever was drafted."""

    slot: int
    token_ids: tuple[int, ...]


Move: TypeAlias = Admit | Release | Copy | Draft
"""What is moved before a launch; one executor carries moves out in the order of the plan."""


class BlockUpdate(NamedTuple):
    """One entry of the block table: block_id stands at `column` of the slot's row."""

    slot: int
    column: int
    block_id: int


class PromptChunk(NamedTuple):
    """What a prefill launch takes of one prompt: token_ids stand at positions start, start + 1, ... of a
    prompt of prompt_len tokens.

    is_last: the prompt ends here, and the launch emits its first token too. mark: behind so many of its
    tokens, a multiple of 64, the state is left in the slot behind those of requests, for a checkpoint; 0 for
    nowhere, and of one piece of a launch at most. next_ids: where the prompt's own
    log probabilities are wanted, the id that follows each of its tokens in the prompt, else empty; such a
    piece goes alone.
    """

    token_ids: tuple[int, ...]
    start: int
    prompt_len: int
    is_last: bool = False
    next_ids: tuple[int, ...] = ()
    snapshot_offset: int = 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One launch: pieces of prompts, a decode round of several requests or one phase of it, or moves alone.

    Carried out in this order: `moves`, `block_updates`, the launch, `saves`.
    prefill: `prompt_chunks`, one a slot; those with is_last also emit a first token and leave shape.chain
    drafts. first: the first token of one request, and shape.chain drafts, after all pieces of its prompt
    without is_last: where the token needs a mask or its log probability is wanted.
    decode: every slot is verified on shape.verify + 1 rows and shape.chain new drafts are left. num_drafts of
    those that are verified were made as drafts; behind them stands id 0.
    verify, accept: the two phases of such a round, with other launches between them if need be; verify ends
    with the logits, accept samples, accepts, commits and drafts. Both carry the round's slots and depths, and
    until accept has been planned nothing else is done with those slots and their blocks. A round whose
    requests have all ended in between has no accept.
    move: nothing is launched; its result comes when every copy given so far is complete.

    logprobs: how many of the likeliest ids some request wants listed, at most 20, or -1 for no log
    probabilities; first and accept alone have them. has_processed_logprobs: some request wants those of the
    logits after masks, temperature and filters. is_guided: a grammar masks some of its rows. wants_drafts:
    the result names the next round's drafts. saves: copies of what pieces leave to checkpoints; complete when
    the plan's result comes. catches_up: before a decode or verify the draft reads what rounds of the plan's
    slots without drafts kept.
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
    saves: tuple[Copy, ...] = ()

    @property
    def ended(self) -> list[int]:
        """Of a prefill, the indices of those in `slots` whose first token it emits."""
        return [index for index, prompt_chunk in enumerate(self.prompt_chunks) if prompt_chunk.is_last]

    @property
    def next_ids(self) -> tuple[int, ...]:
        """Of a prefill, those of a piece that goes alone."""
        return self.prompt_chunks[0].next_ids if len(self.prompt_chunks) == 1 else ()


class RowLogprobs(NamedTuple):
    """Log probabilities of n drawn tokens: [n], [n], [n][20] and [n][20].

    ranks count from 1, the likeliest; of equal ids the lowest comes first. top_logprobs is -inf where fewer
    ids can be drawn.
    """

    logprobs: Sequence[float]
    ranks: Sequence[int]
    top_ids: Sequence[Sequence[int]]
    top_logprobs: Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of a launch, one entry a slot of `plan`, or the error that it ended with.

    token_ids: the tokens each request gained, [y_0] after the last piece of a prompt and [] before.
    not_finite: indices in plan.slots of requests whose next token could not be drawn, since its row of logits
    is not finite; token_ids holds what was drawn before that row. all_masked: likewise, since every id of
    that row is masked. drafts: the next round's, where they were asked for, else empty. copies_done: ids of
    the copies that are complete; copies_failed: of those that never began, since there was no memory for
    their target. logprobs: those of token_ids, where they were asked for, else empty; prompt_logprobs: those
    of plan.next_ids. is_late: the device was done before the host asked, since when is not known. With an
    error none of the plan's copies is under way any more.
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
