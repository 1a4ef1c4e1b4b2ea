"""Counts and times of one request."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

# Above every number of drafts that a round may verify.
MOST_KEPT = 16
LOOKED_UP = 256
"""Marks a round whose drafts were looked up in the request's text."""


@dataclass(slots=True, eq=False)
class RequestHistory:
    """The counts behind the metrics of one request; it only grows, so that each metrics object is a prefix.

    mtp_step: the most drafts of a chain; max_drafts: the most that a round verifies, 0 for mtp_step. rounds:
    for each verify round, the drafts that it verified and kept, as verified * 16 + kept, plus LOOKED_UP if
    they were looked up in the text. is_given: the output is given, so the rounds show nothing of drafts.
    """

    prompt_tokens: int
    seed: int
    mtp_step: int = 0
    max_drafts: int = 0
    rounds: list[int] = field(default_factory=list)
    time_to_first_token_s: float | None = None
    cached_tokens: int = 0
    image_tokens: int = 0
    is_given: bool = False


class RequestMetrics(NamedTuple):
    """Counts and times of one request up to the output that carries them; ratios are in `spec.stats`.

    It is a snapshot: later steps make new ones. rounds counts verify rounds. rounds and output_tokens leave
    out tokens after a stop; the first output token comes from prefill, the others from the rounds. Times are
    seconds from the request's arrival; total_s is the time of its last token, or of its end. Each step makes
    one for each request, so the expensive counts are computed on demand.
    """

    history: RequestHistory
    rounds: int
    output_tokens: int
    total_s: float

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return self.history.prompt_tokens

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that came from the prefix cache."""
        return self.history.cached_tokens

    @property
    def image_tokens(self) -> int:
        """Tokens of the prompt that are images."""
        return self.history.image_tokens

    @property
    def seed(self) -> int:
        """The seed of the sampling noise: given, derived or drawn."""
        return self.history.seed

    @property
    def time_to_first_token_s(self) -> float | None:
        """Seconds from arrival to the first token; None before it."""
        return self.history.time_to_first_token_s if self.output_tokens else None

    @property
    def rounds_by_accepted(self) -> list[int]:
        """[max_drafts + 1] Verify rounds that kept exactly n drafts, for each n."""
        chain, looked_up = self._count_rounds(0), self._count_rounds(LOOKED_UP)
        return [sum(counts) for counts in zip(chain[0], looked_up[0], strict=True)]

    @property
    def drafted(self) -> int:
        """Drafts that the rounds verified, from the MTP head and from the text."""
        return sum(pair % LOOKED_UP // MOST_KEPT for pair in self.history.rounds[: self.rounds])

    @property
    def accepted(self) -> int:
        """Drafts that the rounds kept."""
        return sum(pair % MOST_KEPT for pair in self.history.rounds[: self.rounds])

    @property
    def accepted_by_index(self) -> list[int]:
        """[mtp_step] Rounds that kept draft i + 1 of a chain, for each i."""
        return _at_least(self._count_rounds(0)[0])[: self.history.mtp_step]

    @property
    def drafted_by_index(self) -> list[int]:
        """[mtp_step] Rounds that verified draft i + 1 of a chain, for each i."""
        return _at_least(self._count_rounds(0)[1])[: self.history.mtp_step]

    @property
    def lookup_rounds(self) -> int:
        """Verify rounds whose drafts were looked up in the text."""
        return sum(self._count_rounds(LOOKED_UP)[0])

    @property
    def lookup_drafted(self) -> int:
        """Drafts of the `lookup_rounds`."""
        return sum(_at_least(self._count_rounds(LOOKED_UP)[1]))

    @property
    def lookup_accepted(self) -> int:
        """Kept drafts of the `lookup_rounds`."""
        return sum(_at_least(self._count_rounds(LOOKED_UP)[0]))

    def _count_rounds(self, source: int) -> tuple[list[int], list[int]]:
        """Return rounds of one source, 0 (a chain) or LOOKED_UP, by the number of kept drafts, and by the
        number of verified drafts."""
        width = max(self.history.mtp_step, self.history.max_drafts) + 1
        kept, verified = [0] * width, [0] * width
        for pair, count in Counter(self.history.rounds[: self.rounds]).items():
            if pair & LOOKED_UP == source:
                kept[pair % MOST_KEPT] += count
                verified[pair % LOOKED_UP // MOST_KEPT] += count
        return kept, verified


def _at_least(counts: list[int]) -> list[int]:
    """Return, for each n of at least 1, the sum of the counts from n on."""
    return [sum(counts[n:]) for n in range(1, len(counts))]
