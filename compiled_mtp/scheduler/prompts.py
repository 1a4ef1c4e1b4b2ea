"""Which pieces of which prompts the next launch takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from compiled_mtp.graphs.buckets import lay_out
from compiled_mtp.plan import Admit, BlockUpdate, Copy, Move, Piece, Place
from compiled_mtp.scheduler.holdings import Holding, Holdings, block_table_row
from compiled_mtp.scheduler.slot_sampling import slot_sampling

Admitter = Callable[[int], Holding | None]
"""Gives a place to whoever comes next, if what is left of the prompt fits into so many rows and nothing
speaks against its company; else None."""


@dataclass(slots=True)
class Launch:
    """Pieces of prompts, what they bring for a plan to carry, and whose first tokens are drawn in it."""

    members: list[Holding] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
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
    def ended(self) -> list[Holding]:
        """Those whose prompts end, in a launch that emits their first tokens."""
        pairs = zip(self.members, self.pieces, strict=True)
        return [holding for holding, piece in pairs if piece.is_last]

    @property
    def num_rows(self) -> int:
        """Rows up to where another piece would begin."""
        first_rows, _ = lay_out([*(len(piece.token_ids) for piece in self.pieces), 0])
        return first_rows[-1]


class Prompts:
    """The requests whose prompts are on their way, in the order in which they came in.

    A launch takes the next piece of the first of them, as long as may be. Behind it come others as long as
    all that is left of them fits: a part of a prompt gives its owner nothing yet, and would only keep those
    before it waiting. One whose log probabilities are wanted goes alone.
    """

    def __init__(self, holdings: Holdings, copy_ids: Iterator[int]) -> None:
        self._holdings = holdings
        self._copy_ids = copy_ids
        self.members: list[Holding] = []

    def __bool__(self) -> bool:
        return bool(self.members)

    def leave(self, holding: Holding) -> bool:
        """A request is not prefilled any more, or never was; whether it was."""
        was_member = holding in self.members
        if was_member:
            self.members.remove(holding)
        return was_member

    def next_prefilled(self) -> Holding | None:
        """Whose prompt has been planned to its end, its first token not."""
        return next((holding for holding in self.members if holding.is_prefilled), None)

    def may_join(self, holding: Holding, num_rows: int) -> bool:
        """Whether a request that waits may share the launch that is planned, which has so many rows left.

        Not if it shares more of its prompt with one that is on its way than is cached: it comes when that
        can be found.
        """
        prefix, request = self._holdings.prefix, holding.request
        if request.wants_prompt_logprobs or prefix.is_coming(holding):
            return False
        return request.prompt_len - prefix.foresee(holding) <= num_rows

    def plan(self, most: int, max_pieces: int, admit: Admitter) -> Launch:
        """Take pieces for a launch of at most `most` rows; those who join, by `admit`, are members then."""
        launch, resuming = Launch(), list[Holding]()
        holding: Holding | None = self.members[0]
        while holding is not None:
            is_resuming = not holding.is_told and holding.resumption is not None
            self._take(holding, most - launch.num_rows, launch)
            if is_resuming:
                resuming.append(holding)
            is_full = len(launch.pieces) == max_pieces or holding.request.wants_prompt_logprobs
            holding = None if is_full else self._next(launch, most - launch.num_rows, admit)
        for holding in resuming:
            # Not before: what checkpoints push out is copied first, and would go where this lies.
            self._holdings.prefix.begin(holding)
        return launch

    def _next(self, launch: Launch, num_rows: int, admit: Admitter) -> Holding | None:
        """Who has the next piece; None if nobody fits."""
        count = len(launch.pieces)
        if num_rows <= 0:
            return None
        if count == len(self.members):
            return admit(num_rows)
        holding = self.members[count]
        is_alone = holding.request.wants_prompt_logprobs
        num_left = holding.request.prompt_len - holding.num_prefilled
        return holding if num_left <= num_rows and not is_alone else None

    def _take(self, holding: Holding, num_rows: int, launch: Launch) -> None:
        """Put the next piece of a prompt, of at most `num_rows` tokens, into a launch."""
        if not holding.is_told:
            launch.start(self._start_slot(holding))
            launch.block_updates += block_table_row(holding.slot, holding.block_ids)
        prefix, request, start = self._holdings.prefix, holding.request, holding.num_prefilled
        end = min(start + num_rows, request.prompt_len)
        places = prefix.places(holding, end)
        # A launch leaves one state beside those at the ends of its pieces: others end where it is wanted.
        has_mark = any(piece.mark for piece in launch.pieces)
        marked = places.pop(0) if places and not has_mark else 0
        end = places[0] if places else end
        holding.num_prefilled, holding.is_told = end, True
        slots = {marked: self._holdings.limits.max_batch + 1, end: holding.slot}
        for position in sorted(slots.keys() - {0}):
            if (checkpoint := prefix.take_checkpoint(holding, start, position)) is not None:
                source, target = Place("slot", slots[position]), Place("checkpoint", checkpoint)
                launch.saves.append(self.copy(source, target))
            elif position == marked:
                marked = 0
        # Its first token is a plan of its own where something is to be done with its logits.
        is_last = end == request.prompt_len and not request.is_halved
        # The last row of a piece gives the first token of the next, that of the prompt nothing of it.
        next_ids = request.prompt_token_ids[start + 1 : end + 1] if request.wants_prompt_logprobs else ()
        token_ids = tuple(request.prompt_token_ids[start:end])
        launch.members.append(holding)
        mark = marked - start if marked else 0
        launch.pieces.append(Piece(token_ids, start, request.prompt_len, is_last, tuple(next_ids), mark))

    def _start_slot(self, holding: Holding) -> list[Move]:
        """The first plan of a request in its slot: its parameters, and the prefix behind which it begins."""
        moves: list[Move] = [Admit(holding.slot, slot_sampling(holding.request))]
        if (resumption := holding.resumption) is not None:
            slot = Place("slot", holding.slot)
            pairs = tuple(zip(resumption.shelf_blocks, self._last_cached_blocks(holding), strict=True))
            moves.append(self.copy(resumption.source, slot, pairs))
            if resumption.checkpoint is not None:
                moves.append(self.copy(slot, Place("checkpoint", resumption.checkpoint)))
        return moves

    def _last_cached_blocks(self, holding: Holding) -> list[int]:
        """Those of a request that are filled from the host tier of the prefix cache."""
        assert holding.resumption is not None
        end = holding.num_prefilled // self._holdings.limits.block_size
        return holding.block_ids[end - len(holding.resumption.shelf_blocks) : end]

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
