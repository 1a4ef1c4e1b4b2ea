"""Chooses the shape of each round: how many drafts it verifies, and how many it leaves for the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from compiled_mtp.graphs.buckets import RoundShape
from compiled_mtp.plan import new_tuple
from compiled_mtp.scheduler.limits import Limits
from compiled_mtp.scheduler.scheduled_request import ScheduledRequest
from compiled_mtp.scheduler.wants import Wants

Depth = Callable[[int, int, bool], int]
"""Returns how many drafts the next round verifies and leaves, 0 to mtp_step.

Arguments: the number of requests, the mean tokens of their contexts when the planner last examined them, and
whether the round has two phases. Called once per round, and once before the first with 0 requests."""

Widen = Callable[[], bool]
"""Returns whether the next round, of the depth that `Depth` returned last, verifies all looked-up drafts."""


class NextRound(NamedTuple):
    """The shape of a round, the drafts that count in statistics, and whether the draft model catches up."""

    shape: RoundShape
    num_drafts: int
    catches_up: bool


class RoundShapes:
    """Chooses shapes for the requests that decode; without `depth`, rounds of mtp_step drafts."""

    def __init__(self, limits: Limits, depth: Depth | None, widen: Widen | None) -> None:
        self._limits = limits
        self._depth = depth
        self._widen = widen
        self.examine(())
        # The number of drafts that the launches planned so far leave on the device.
        self.chain = self._choose_depth(is_two_phase=False)

    def examine(self, members: Sequence[ScheduledRequest]) -> None:
        """Take the requests of the next rounds."""
        self._members = members
        tokens = sum(one.request.prompt_len + len(one.request.output_token_ids) for one in members)
        self._context_tokens = tokens // max(len(members), 1)
        # Whether the draft model has read all deferred inputs of the members.
        self._is_caught_up = False

    def choose(self, wants: Wants) -> NextRound:
        """Choose the shape of the next round, which will be planned; wants: what the members need."""
        if wants.are_all_given:
            # Given tokens are right drafts. Nothing is drafted, so the drafts of the last launch stay.
            verify = self._choose_given()
            return NextRound(RoundShape(verify, 0), verify, catches_up=False)
        depth = self._choose_depth(is_two_phase=wants.is_two_phase)
        verify = self._limits.wide_drafts if self._is_wide() else depth
        # Only statistics read num_drafts: a resumed request may have another number of drafts.
        num_drafts, self.chain = min(verify, self.chain), depth
        shape = new_tuple(RoundShape, (verify, depth))
        return new_tuple(NextRound, (shape, num_drafts, self._catches_up(verify)))

    def _catches_up(self, verify: int) -> bool:
        """Return whether the draft model must catch up before a round that verifies `verify` drafts.

        Counts the deferred draft inputs of the round, too.
        """
        if not self._limits.mtp_step or (verify and self._is_caught_up):
            return False
        most_deferred = max(scheduled.num_deferred for scheduled in self._members)
        # A slot has room for the deferred draft inputs of mtp_step + 1 rounds.
        catches_up = most_deferred > (0 if verify else self._limits.mtp_step)
        for scheduled in self._members:
            scheduled.num_deferred = (0 if catches_up else scheduled.num_deferred) + (not verify)
        self._is_caught_up = verify > 0
        return catches_up

    def _is_wide(self) -> bool:
        """Return whether the next round verifies all drafts that were looked up for its requests.

        The last results that were read decide, although a launch in flight may leave drafts of a chain.
        """
        if self._widen is None or len(self._members) > self._limits.wide_requests:
            return False
        return all(scheduled.has_text_drafts for scheduled in self._members) and self._widen()

    def _choose_given(self) -> int:
        """Return how many given tokens the next round verifies.

        They are as few as end all its requests, or the most that a round of this many requests may verify.
        """
        left = max(one.known.num_left for one in self._members if one.known is not None)
        fitting = [drafts for drafts, most in self._limits.given if len(self._members) <= most]
        return next((drafts for drafts in fitting if drafts + 1 >= left), fitting[-1])

    def _choose_depth(self, *, is_two_phase: bool) -> int:
        mtp_step, depth = self._limits.mtp_step, self._limits.mtp_step
        if self._depth is not None:
            depth = self._depth(len(self._members), self._context_tokens, is_two_phase)
        if not 0 <= depth <= mtp_step:
            raise ValueError(f"depth must be 0 to {mtp_step} (mtp_step), got {depth}; choose another")
        return depth
