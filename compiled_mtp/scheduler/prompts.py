"""Chooses the prompt chunks of the next prefill launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from compiled_mtp.graphs.buckets import lay_out, pick_prefill_length
from compiled_mtp.plan import Admit, BlockUpdate, Copy, EncodeSlice, Location, Move, PromptChunk
from compiled_mtp.request import Request
from compiled_mtp.scheduler.resources import Resources, block_table_row
from compiled_mtp.scheduler.scheduled_request import ScheduledRequest
from compiled_mtp.scheduler.slot_sampling import slot_sampling

Admitter = Callable[[int | None], ScheduledRequest | None]
"""Admits the next waiting request if the rest of its prompt fits into the given number of rows, None for any
prompt, and it may share a launch; else returns None."""


@dataclass(slots=True)
class Launch:
    """The prompt chunks of one launch, with the moves, block-table updates and saves of its plan."""

    members: list[ScheduledRequest] = field(default_factory=list)
    prompt_chunks: list[PromptChunk] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    block_updates: list[BlockUpdate] = field(default_factory=list)
    saves: list[Copy] = field(default_factory=list)

    def start(self, moves: Sequence[Move]) -> None:
        """Add the moves of a request that starts.

        A move may fill a snapshot that this launch has already taken from another request. That request's
        save is dropped, because it would run after the move and overwrite the snapshot.
        """
        self.moves += moves
        filled = {move.target for move in moves if isinstance(move, Copy)}
        self.saves = [save for save in self.saves if save.target not in filled]

    @property
    def ended(self) -> list[ScheduledRequest]:
        """The requests whose prompts end in this launch, which emits their first tokens."""
        pairs = zip(self.members, self.prompt_chunks, strict=True)
        return [scheduled for scheduled, prompt_chunk in pairs if prompt_chunk.is_last]

    @property
    def num_rows(self) -> int:
        """The row at which another chunk would begin."""
        first_rows, _ = lay_out([*(len(prompt_chunk.token_ids) for prompt_chunk in self.prompt_chunks), 0])
        return first_rows[-1]


class Prompts:
    """The requests whose prompts are being prefilled, in the order of admission.

    A launch takes the longest possible chunk of the first request. It adds others if all the rest of their
    prompts fits: a part of a prompt emits no token, and would only delay the requests before it. Last comes
    a part of the next prompt, if it takes no more rows than the launch's program has anyway. A prompt whose
    log probabilities are wanted has a launch of its own.
    """

    def __init__(self, resources: Resources, copy_ids: Iterator[int]) -> None:
        self._resources = resources
        self._copy_ids = copy_ids
        self.members: list[ScheduledRequest] = []

    def __bool__(self) -> bool:
        return bool(self.members)

    def leave(self, scheduled: ScheduledRequest) -> bool:
        """Remove a request if it is being prefilled; return whether it was."""
        was_member = scheduled in self.members
        if was_member:
            self.members.remove(scheduled)
        return was_member

    def next_prefilled(self) -> ScheduledRequest | None:
        """Return a request whose whole prompt has been planned but not its first token; None if there is
        none.
        """
        return next((scheduled for scheduled in self.members if scheduled.is_prefilled), None)

    def may_join(self, scheduled: ScheduledRequest, num_rows: int | None) -> bool:
        """Return whether a waiting request may share the planned launch with the rest of its prompt, for
        which there are num_rows rows, or for None with a part.

        It may not if a prompt that is being prefilled will cache more of its prefix than is cached now: it
        then waits until that prefix can be found.
        """
        prefix, request = self._resources.prefix, scheduled.request
        if request.wants_prompt_logprobs or prefix.is_coming(scheduled):
            return False
        start = prefix.predict_start(scheduled)
        # Images are encoded for the first prompt alone.
        fits = num_rows is None or request.prompt_len - start <= num_rows
        return fits and not _has_images(scheduled, start)

    def next_slice(self, most: int) -> EncodeSlice | None:
        """Return the next slice of the vision tower that a launch of `most` rows waits for; None for none.

        It belongs to the first prompt.
        """
        scheduled, tower = self.members[0], self._resources.limits.tower
        end = min(scheduled.num_prefilled + most, scheduled.request.prompt_len)
        for number, image in enumerate(scheduled.request.images):
            # Nothing reads the features of an image that the prefix cache holds whole.
            if number < scheduled.num_encoded or image.span.end <= scheduled.num_prefilled:
                continue
            if image.span.start >= end:
                return None
            assert tower is not None, "an engine without images has accepted one"
            first, count = scheduled.next_part, tower.count_parts(image.span.num_tokens)
            last = min(first + tower.slice_parts(image.span.num_tokens), count)
            is_last = last == count
            if is_last:
                scheduled.num_encoded, scheduled.next_part = number + 1, 0
            else:
                scheduled.next_part = last
            return EncodeSlice(number, image.span, first, last, is_last, b"" if first else image.pixels)
        return None

    def plan(self, most: int, max_prompt_chunks: int, admit: Admitter) -> Launch:
        """Choose the chunks of a launch of at most `most` rows; requests from `admit` become members."""
        launch, resuming = Launch(), list[ScheduledRequest]()
        scheduled: ScheduledRequest | None = self.members[0]
        num_rows, is_part = most, False
        while scheduled is not None:
            is_resuming = not scheduled.is_installed and scheduled.resumption is not None
            self._take(scheduled, num_rows, launch)
            if is_resuming:
                resuming.append(scheduled)
            is_full = (
                len(launch.prompt_chunks) == max_prompt_chunks or scheduled.request.wants_prompt_logprobs
            )
            if is_full or is_part:
                break
            num_rows = most - launch.num_rows
            scheduled = self._next(launch, num_rows, admit)
            if scheduled is None and (spare := min(self._spare_rows(launch), num_rows)) > 0:
                scheduled, num_rows, is_part = self._next(launch, None, admit), spare, True
        for scheduled in resuming:
            # Last: evictions by the snapshots above are copied to the host tier first, and would overwrite
            # the host blocks that this request still reads.
            self._resources.prefix.begin(scheduled)
        return launch

    def _spare_rows(self, launch: Launch) -> int:
        """Return the rows of the launch's program that another chunk may have, a multiple of the tokens at
        which a prompt may resume; 0 without programs."""
        limits, count = self._resources.limits, len(launch.prompt_chunks)
        if not limits.prompt_lengths:
            return 0
        length, with_another = (
            pick_prefill_length(limits.prompt_lengths, launch.num_rows, number, limits.max_batch)
            for number in (count, count + 1)
        )
        spare = length - launch.num_rows
        return spare - spare % limits.resume_step if with_another == length else 0

    def _next(self, launch: Launch, num_rows: int | None, admit: Admitter) -> ScheduledRequest | None:
        """Return the request of the next chunk, a whole rest of num_rows rows or for None a part; None if
        none fits."""
        count = len(launch.prompt_chunks)
        if num_rows is not None and num_rows <= 0:
            return None
        if count == len(self.members):
            return admit(num_rows)
        scheduled = self.members[count]
        is_alone = scheduled.request.wants_prompt_logprobs
        is_alone = is_alone or _has_images(scheduled, scheduled.num_prefilled)
        num_left = scheduled.request.prompt_len - scheduled.num_prefilled
        fits = num_rows is None or num_left <= num_rows
        return scheduled if fits and not is_alone else None

    def _take(self, scheduled: ScheduledRequest, num_rows: int, launch: Launch) -> None:
        """Put the next chunk of a prompt, of at most `num_rows` tokens, into a launch."""
        if not scheduled.is_installed:
            launch.start(self._start_slot(scheduled))
            launch.block_updates += block_table_row(scheduled.slot, scheduled.block_ids)
        prefix, request, start = self._resources.prefix, scheduled.request, scheduled.num_prefilled
        end = min(start + num_rows, request.prompt_len)
        positions = prefix.snapshot_positions(scheduled, end)
        # A launch can save the states at its chunks' ends, and one state inside a chunk. If another chunk has
        # the latter, this chunk ends at its first snapshot position.
        has_inner = any(prompt_chunk.snapshot_offset for prompt_chunk in launch.prompt_chunks)
        inner = positions.pop(0) if positions and not has_inner else 0
        end = positions[0] if positions else end
        scheduled.num_prefilled, scheduled.is_installed = end, True
        slots = {inner: self._resources.limits.max_batch + 1, end: scheduled.slot}
        for position in sorted(slots.keys() - {0}):
            if (snapshot := prefix.take_snapshot(scheduled, start, position)) is not None:
                source, target = Location("slot", slots[position]), Location("snapshot", snapshot)
                launch.saves.append(self.copy(source, target))
            elif position == inner:
                inner = 0
        # The first token of a two-phase request has a plan of its own, which changes the logits first.
        is_last = end == request.prompt_len and not request.is_two_phase
        # The last row of a chunk scores the first token of the next chunk; the prompt's last row scores none.
        next_ids = request.prompt_token_ids[start + 1 : end + 1] if request.wants_prompt_logprobs else ()
        token_ids = tuple(request.prompt_token_ids[start:end])
        launch.members.append(scheduled)
        snapshot_offset = inner - start if inner else 0
        launch.prompt_chunks.append(
            PromptChunk(
                token_ids,
                start,
                request.prompt_len,
                is_last,
                tuple(next_ids),
                snapshot_offset,
                tuple(image.span for image in request.images if image.span.start < end),
            )
        )

    def _start_slot(self, scheduled: ScheduledRequest) -> list[Move]:
        """Return the moves of a request's first plan: its parameters, and the state of its cached prefix."""
        request = scheduled.request
        text = _text_of(request) if self._resources.limits.has_lookup else ()
        admit = Admit(scheduled.slot, slot_sampling(request), text=text, rotary_delta=request.rotary_delta)
        moves: list[Move] = [admit]
        if (resumption := scheduled.resumption) is not None:
            slot = Location("slot", scheduled.slot)
            pairs = tuple(
                zip(resumption.prefix_host_blocks, self._last_cached_blocks(scheduled), strict=True)
            )
            moves.append(self.copy(resumption.source, slot, pairs))
            if resumption.snapshot is not None:
                moves.append(self.copy(slot, Location("snapshot", resumption.snapshot)))
        return moves

    def _last_cached_blocks(self, scheduled: ScheduledRequest) -> list[int]:
        """Return the request's blocks that the host tier of the prefix cache fills."""
        assert scheduled.resumption is not None
        end = scheduled.num_prefilled // self._resources.limits.block_size
        return scheduled.block_ids[end - len(scheduled.resumption.prefix_host_blocks) : end]

    def copy(
        self,
        source: Location,
        target: Location,
        blocks: tuple[tuple[int, int], ...] = (),
        *,
        has_rows: bool = True,
    ) -> Copy:
        """Return a copy with a new number."""
        return Copy(next(self._copy_ids), source, target, blocks, has_rows)


def _has_images(scheduled: ScheduledRequest, start: int) -> bool:
    """Return whether an image of the prompt reaches beyond position `start`."""
    return any(image.span.end > start for image in scheduled.request.images)


def _text_of(request: Request) -> tuple[int, ...]:
    """The prompt's ids, in which drafts are looked up; -1 for tokens of images, which match nothing."""
    ids = list(request.prompt_token_ids)
    for image in request.images:
        ids[image.span.start : image.span.end] = [-1] * image.span.num_tokens
    return tuple(ids)
