"""How well drafting works: ratios over the metrics of requests. Pure Python.

Only verify rounds count: the token that prefill emits is not one of theirs, and tokens that a stop cut off do
not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from compiled_mtp.request import RequestMetrics


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Sums over the verify rounds of any number of requests, and ratios of these sums.

    round_tokens: the tokens that rounds emitted. accepted_by_index[i]: the rounds that kept draft i + 1 of a
    chain of the MTP head; drafted_by_index[i]: the rounds that verified such a draft. lookup_rounds: the
    rounds with drafts from the text; lookup_drafted, lookup_accepted: the drafts of these rounds, and the
    kept ones. A ratio without a draft or a round is 0.
    """

    rounds: int
    round_tokens: int
    accepted_by_index: tuple[int, ...]
    drafted_by_index: tuple[int, ...]
    lookup_rounds: int = 0
    lookup_drafted: int = 0
    lookup_accepted: int = 0

    @classmethod
    def empty(cls, mtp_step: int) -> Self:
        """Return the sums of no request."""
        none = (0,) * mtp_step
        return cls(rounds=0, round_tokens=0, accepted_by_index=none, drafted_by_index=none)

    def plus(self, metrics: RequestMetrics) -> SpeculationStats:
        """Return these sums with the counts of one more request, of the same mtp_step."""
        return SpeculationStats(
            rounds=self.rounds + metrics.rounds,
            round_tokens=self.round_tokens + max(metrics.output_tokens - 1, 0),
            accepted_by_index=_add(self.accepted_by_index, metrics.accepted_by_index),
            drafted_by_index=_add(self.drafted_by_index, metrics.drafted_by_index),
            lookup_rounds=self.lookup_rounds + metrics.lookup_rounds,
            lookup_drafted=self.lookup_drafted + metrics.lookup_drafted,
            lookup_accepted=self.lookup_accepted + metrics.lookup_accepted,
        )

    @property
    def mean_new_tokens(self) -> float:
        """Mean tokens per verify round: 1 to the most drafts + 1, less what stops cut off."""
        return self.round_tokens / self.rounds if self.rounds else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts / proposed drafts of the MTP head."""
        proposed = sum(self.drafted_by_index)
        return sum(self.accepted_by_index) / proposed if proposed else 0.0

    @property
    def acceptance_by_index(self) -> tuple[float, ...]:
        """Rounds that kept draft i + 1 / rounds that verified it, for each i."""
        pairs = zip(self.accepted_by_index, self.drafted_by_index, strict=True)
        return tuple(kept / drafted if drafted else 0.0 for kept, drafted in pairs)


def _add(mine: Sequence[int], more: Sequence[int]) -> tuple[int, ...]:
    return tuple(one + other for one, other in zip(mine, more, strict=True))
