"""Which pieces of which prompts the next launch takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from compiled_mtp.graphs.buckets import lay_out
from compiled_mtp.plan import Admit, BlockUpdate, Copy, Move, Place, PromptChunk
from compiled_mtp.scheduler.resources import Resources, ScheduledRequest, block_table_row
from compiled_mtp.scheduler.slot_sampling import slot_sampling

Admitter = Callable[[int], ScheduledRequest | None]
"""Gives a place to whoever comes next, if what is left of the prompt fits into so many rows and nothing
speaks against its company; else None."""


@dataclass(slots=True)
class Launch:
    """Pieces of prompts, what they bring for a plan to carry, and whose first tokens are drawn in it."""

    members: list[ScheduledRequest] = field(default_factory=list)
    prompt_chunks: list[PromptChunk] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    block_updates: list[BlockUpdate] = field(default_factory=list)
    saves: list[Copy] = field(default_factory=list)

    def start(self, moves: Sequence[Move]) -> None:
        """Take the moves of somebody who begins.

        A checkpoint that one of them fills may have been taken from somebody before in this launch, whose
        save would come behind it.
        """
        self.moves += moves
        filled = {move.target for move in moves if isinstance(move, Copy)}
        self.saves = [save for save in self.saves if save.target not in filled]

    @property
    def ended(self) -> list[ScheduledRequest]:
        """Those whose prompts end, in a launch that emits their first tokens."""
        pairs = zip(self.members, self.prompt_chunks, strict=True)
        return [scheduled for scheduled, prompt_chunk in pairs if prompt_chunk.is_last]

    @property
    def num_rows(self) -> int:
        """Rows up to where another piece would begin."""
        first_rows, _ = lay_out([*(len(prompt_chunk.token_ids) for prompt_chunk in self.prompt_chunks), 0])
        return first_rows[-1]


class Prompts:
    """The requests whose prompts are on their way, in the order in which they came in.

    A launch takes the next piece of the first of them, as long as may be. Behind it come others as long as
    all that is left of them fits: a part of a prompt gives its owner nothing yet, and would only keep those
    before it waiting. One whose log probabilities are wanted goes alone.
    """

    def __init__(self, resources: Resources, copy_ids: Iterator[int]) -> None:
        self._resources = resources
        self._copy_ids = copy_ids
        self.members: list[ScheduledRequest] = []

    def __bool__(self) -> bool:
        return bool(self.members)

    def leave(self, scheduled: ScheduledRequest) -> bool:
        """A request is not prefilled any more, or never was; whether it was."""
        was_member = scheduled in self.members
        if was_member:
            self.members.remove(scheduled)
        return was_member

    def next_prefilled(self) -> ScheduledRequest | None:
        """Whose prompt has been planned to its end, its first token not."""
        return next((scheduled for scheduled in self.members if scheduled.is_prefilled), None)

    def may_join(self, scheduled: ScheduledRequest, num_rows: int) -> bool:
        """Whether a request that waits may share the launch that is planned, which has so many rows left.

        Not if it shares more of its prompt with one that is on its way than is cached: it comes when that
        can be found.
        """
        prefix, request = self._resources.prefix, scheduled.request
        if request.wants_prompt_logprobs or prefix.is_coming(scheduled):
            return False
        return request.prompt_len - prefix.foresee(scheduled) <= num_rows

    def plan(self, most: int, max_prompt_chunks: int, admit: Admitter) -> Launch:
        """Take pieces for a launch of at most `most` rows; those who join, by `admit`, are members then."""
        launch, resuming = Launch(), list[ScheduledRequest]()
        scheduled: ScheduledRequest | None = self.members[0]
        while scheduled is not None:
            is_resuming = not scheduled.is_told and scheduled.resumption is not None
            self._take(scheduled, most - launch.num_rows, launch)
            if is_resuming:
                resuming.append(scheduled)
            is_full = (
                len(launch.prompt_chunks) == max_prompt_chunks or scheduled.request.wants_prompt_logprobs
            )
            scheduled = None if is_full else self._next(launch, most - launch.num_rows, admit)
        for scheduled in resuming:
            # Not before: what checkpoints push out is copied first, and would go where this lies.
            self._resources.prefix.begin(scheduled)
        return launch

    def _next(self, launch: Launch, num_rows: int, admit: Admitter) -> ScheduledRequest | None:
        """Who has the next piece; None if nobody fits."""
        count = len(launch.prompt_chunks)
        if num_rows <= 0:
            return None
        if count == len(self.members):
            return admit(num_rows)
        scheduled = self.members[count]
        is_alone = scheduled.request.wants_prompt_logprobs
        num_left = scheduled.request.prompt_len - scheduled.num_prefilled
        return scheduled if num_left <= num_rows and not is_alone else None

    def _take(self, scheduled: ScheduledRequest, num_rows: int, launch: Launch) -> None:
        """Put the next piece of a prompt, of at most `num_rows` tokens, into a launch."""
        if not scheduled.is_told:
            launch.start(self._start_slot(scheduled))
            launch.block_updates += block_table_row(scheduled.slot, scheduled.block_ids)
        prefix, request, start = self._resources.prefix, scheduled.request, scheduled.num_prefilled
        end = min(start + num_rows, request.prompt_len)
        places = prefix.places(scheduled, end)
        # A launch leaves one state beside those at the ends of its pieces: others end where it is wanted.
        has_mark = any(prompt_chunk.snapshot_offset for prompt_chunk in launch.prompt_chunks)
        marked = places.pop(0) if places and not has_mark else 0
        end = places[0] if places else end
        scheduled.num_prefilled, scheduled.is_told = end, True
        slots = {marked: self._resources.limits.max_batch + 1, end: scheduled.slot}
        for position in sorted(slots.keys() - {0}):
            if (snapshot := prefix.take_snapshot(scheduled, start, position)) is not None:
                source, target = Place("slot", slots[position]), Place("snapshot", snapshot)
                launch.saves.append(self.copy(source, target))
            elif position == marked:
                marked = 0
        # Its first token is a plan of its own where something is to be done with its logits.
        is_last = end == request.prompt_len and not request.is_two_phase
        # The last row of a piece gives the first token of the next, that of the prompt nothing of it.
        next_ids = request.prompt_token_ids[start + 1 : end + 1] if request.wants_prompt_logprobs else ()
        token_ids = tuple(request.prompt_token_ids[start:end])
        launch.members.append(scheduled)
        snapshot_offset = marked - start if marked else 0
        launch.prompt_chunks.append(
            PromptChunk(token_ids, start, request.prompt_len, is_last, tuple(next_ids), snapshot_offset)
        )

    def _start_slot(self, scheduled: ScheduledRequest) -> list[Move]:
        """The first plan of a request in its slot: its parameters, and the prefix behind which it begins."""
        moves: list[Move] = [Admit(scheduled.slot, slot_sampling(scheduled.request))]
        if (resumption := scheduled.resumption) is not None:
            slot = Place("slot", scheduled.slot)
            pairs = tuple(
                zip(resumption.prefix_host_blocks, self._last_cached_blocks(scheduled), strict=True)
            )
            moves.append(self.copy(resumption.source, slot, pairs))
            if resumption.snapshot is not None:
                moves.append(self.copy(slot, Place("snapshot", resumption.snapshot)))
        return moves

    def _last_cached_blocks(self, scheduled: ScheduledRequest) -> list[int]:
        """Those of a request that are filled from the host tier of the prefix cache."""
        assert scheduled.resumption is not None
        end = scheduled.num_prefilled // self._resources.limits.block_size
        return scheduled.block_ids[end - len(scheduled.resumption.prefix_host_blocks) : end]

    def copy(
        self,
        source: Place,
        target: Place,
        blocks: tuple[tuple[int, int], ...] = (),
        *,
        has_rows: bool = True,
    ) -> Copy:
        """A copy with a number of its own."""
        return Copy(next(self._copy_ids), source, target, blocks, has_rows)
