"""ScheduledRequest: a request with its phase, its progress and what it owns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from compiled_mtp.plan import Draft, Location
from compiled_mtp.request import NO_DRAFT, Request
from compiled_mtp.scheduler.phases import RequestPhase, check_transition
from compiled_mtp.scheduler.replay import KnownTokens, Replay


class Resumption(NamedTuple):
    """What fills a request's slot before its first launch.

    source: a state snapshot, or a record of the prefix cache's host tier. prefix_host_blocks: the host blocks
    of the last cached chunks; the request shares the device blocks of the chunks before. snapshot: the state
    snapshot that takes a state from the host again; None for none.
    """

    source: Location
    prefix_host_blocks: tuple[int, ...] = ()
    snapshot: int | None = None


@dataclass(slots=True, eq=False)
class Transfer:
    """The move of a request between a slot and a host record; it owns both, and their blocks, to its end.

    generation: the target slot's generation, 0 for a host record. copy_id: None until the copy is planned,
    after the results of the request's launches are read.
    """

    source: Location
    target: Location
    generation: int
    target_block_ids: list[int]
    copy_id: int | None = None


@dataclass(slots=True, eq=False)
class ScheduledRequest:
    """A request, its phase, and what it owns: a slot (0: none) of a generation, a host record (None: none),
    and blocks on the device or the host, where its rows lie.

    arrival: its number by order of arrival. is_due: it goes before all requests that are not. most_blocks:
    the blocks of its worst case, set when it is admitted. num_prefilled: prompt tokens that are cached or
    planned. resumption: what fills its slot before its first launch; None: the prompt begins at position 0.
    prefix_keys: the keys of the prompt's whole chunks, None until computed. is_looked_up: the prefix cache
    has counted its lookup. is_installed: a plan has installed it in its slot. is_first_token_due: its first
    token is planned, and the result not read. is_in_open_round: the verify of its two-phase round is planned,
    and the accept not. drafts: the drafts of its next round, if its grammar or its caller needs them.
    has_text_drafts: the last launch that was read left it with looked-up drafts. num_deferred: its deferred
    draft inputs, one for each round without drafts. num_encoded: images of its prompt whose features are
    planned or cached; next_part: of the next image, the next part of the vision tower. transfer: its move in
    progress. replay: the recomputation of its tokens. known: the tokens that its rounds verify as drafts:
    given tokens, or the tokens of the replay.
    """

    request: Request
    arrival: int = 0
    phase: RequestPhase = RequestPhase.WAITING
    is_due: bool = False
    slot: int = 0
    generation: int = 0
    host_record: int | None = None
    block_ids: list[int] = field(default_factory=list)
    most_blocks: int = 0
    num_prefilled: int = 0
    resumption: Resumption | None = None
    prefix_keys: list[bytes] | None = None
    is_looked_up: bool = False
    is_installed: bool = False
    is_first_token_due: bool = False
    is_in_open_round: bool = False
    drafts: Sequence[int] = ()
    has_text_drafts: bool = False
    num_deferred: int = 0
    num_encoded: int = 0
    next_part: int = 0
    transfer: Transfer | None = None
    replay: Replay | None = None
    known: KnownTokens | None = None

    def enter(self, phase: RequestPhase) -> None:
        """Set the phase; raises AssertionError for one that may not follow."""
        check_transition(self.phase, phase)
        self.phase = phase

    @property
    def rank(self) -> tuple[int, int, int]:
        """A sort key, the lowest first: requests that are due, then by priority, then by arrival."""
        return (0, 0, self.arrival) if self.is_due else (1, self.request.priority, self.arrival)

    @property
    def num_emitted(self) -> int:
        """Output tokens that were read after the last prefill of its prompt."""
        replay = self.replay
        return len(self.request.output_token_ids) if replay is None else replay.num_compared

    def round_drafts(self, verify: int) -> Sequence[int]:
        """Return the `verify` drafts of the round whose accept is planned: known tokens, then `drafts`,
        then NO_DRAFT.
        """
        uploaded = () if self.known is None else self.known.uploaded
        known = [*uploaded, *self.drafts[len(uploaded) : verify]]
        return known + [NO_DRAFT] * (verify - len(known))

    def known_drafts(self, verify: int) -> Iterator[Draft]:
        """Plan the known tokens that the next round of `verify` drafts verifies; yield their upload."""
        if self.known is not None and (token_ids := self.known.plan_round(verify)):
            yield Draft(self.slot, tuple(token_ids))

    def reset_progress(self) -> None:
        """Reset slot, blocks and progress for a new start; output tokens become a replay."""
        self.slot, self.block_ids, self.num_prefilled = 0, [], 0
        self.is_installed = self.is_first_token_due = False
        self.drafts, self.has_text_drafts, self.num_deferred = (), False, 0
        self.forget_features()
        emitted, forced = tuple(self.request.output_token_ids), self.request.forced_ids
        self.replay = Replay(emitted) if emitted else None
        self.known = KnownTokens(forced or emitted) if forced or emitted else None

    def end_replay(self) -> None:
        """Go on after the last recomputed token: rounds verify drafts again, unless the output is given."""
        self.replay = None
        if not self.request.forced_ids:
            self.known = None

    def forget_features(self) -> None:
        """Encode its images anew: the device has freed their features."""
        self.num_encoded = self.next_part = 0

    @property
    def location(self) -> Location | None:
        """The host record or slot that holds its rows; None if it owns neither."""
        if self.host_record is not None:
            return Location("host", self.host_record)
        return Location("slot", self.slot) if self.slot else None

    @property
    def is_prefilled(self) -> bool:
        """Whether every chunk of its prompt has been planned."""
        return self.num_prefilled == self.request.prompt_len

    @property
    def is_pinned(self) -> bool:
        """Whether a planned copy or the open round will still use its slot and blocks."""
        is_copied = self.transfer is not None and self.transfer.copy_id is not None
        return is_copied or self.is_in_open_round
