"""What the scheduler and the runner tell each other: one plan a launch, one result a plan. No torch.

A plan says everything a launch needs and a result everything that came of it, by name. Plans are frozen:
the scheduler keeps those whose results are due and compares them by identity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

PlanKind: TypeAlias = Literal["prefill", "decode", "verify", "accept", "move"]


class Place(NamedTuple):
    """Where the rows of a request lie: in a slot of the device, a checkpoint of the device, a host record."""

    tier: Literal["slot", "checkpoint", "host"]
    number: int


@dataclass(frozen=True, slots=True)
class Admit:
    """Give a slot to a request: its registered rows take their initial values, its parameters these.

    Follows the giving of a slot, not the first chunk of a prompt: a request that resumes behind a cached
    prefix starts its slot too.
    """

    slot: int
    seed: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float


@dataclass(frozen=True, slots=True)
class Release:
    """Take a slot back: its block-table row becomes -1, so that nothing writes through it any more."""

    slot: int


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy every registered row of a request, and blocks, from one place to another.

    blocks are pairs (source block, target block); ids of the host tier index its own blocks. Both places
    belong to the copy until a result names copy_id in `copies_done`.
    """

    copy_id: int
    source: Place
    target: Place
    blocks: tuple[tuple[int, int], ...] = ()


Move: TypeAlias = Admit | Release | Copy
"""What is moved before a launch; one executor carries moves out in the order of the plan."""


class BlockUpdate(NamedTuple):
    """One entry of the block table: block_id stands at `column` of the slot's row."""

    slot: int
    column: int
    block_id: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One launch: a prefill chunk of one request, a decode round of several or half of one, or moves alone.

    Carried out in this order: `moves`, `block_updates`, the launch.
    prefill: token_ids stand at positions start, start + 1, ... of a prompt of prompt_len tokens; the last
    chunk also emits the first token and leaves draft_step drafts.
    decode: every slot is verified on verify_step + 1 rows and draft_step new drafts are left.
    verify, accept: the two halves of such a round, with other launches between them if need be; verify ends
    with the logits, accept samples, accepts, commits and drafts. Both carry the round's slots and depths, and
    until accept has been planned nothing else is done with those slots and their blocks. A round whose
    requests have all ended in between has no accept.
    move: nothing is launched; its result comes when every copy given so far is complete.
    """

    step_id: int
    kind: PlanKind
    slots: tuple[int, ...] = ()
    generations: tuple[int, ...] = ()
    verify_step: int = 0
    draft_step: int = 0
    token_ids: tuple[int, ...] = ()
    start: int = 0
    is_last: bool = False
    prompt_len: int = 0
    moves: tuple[Move, ...] = ()
    block_updates: tuple[BlockUpdate, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of a launch, one entry a slot of `plan`, or the error that it ended with.

    token_ids: the tokens each request gained, [[y_0]] after the last chunk of a prompt and [[]] before.
    not_finite: indices in plan.slots of requests whose next token could not be drawn, since its row of logits
    is not finite; token_ids holds what was drawn before that row. drafts: the next round's, where they were
    asked for, else empty. copies_done: ids of the copies that are complete. With an error none of the plan's
    copies is under way any more.
    """

    plan: StepPlan
    token_ids: Sequence[list[int]] = ()
    not_finite: tuple[int, ...] = ()
    drafts: Sequence[Sequence[int]] = ()
    copies_done: tuple[int, ...] = ()
    error: str | None = None
