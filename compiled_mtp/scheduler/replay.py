"""Tokens that a request will emit and that the host knows: given tokens, and the tokens of a recomputed
request.

The known tokens are the drafts of the request's rounds. A recomputed request was preempted and not offloaded:
its prompt is prefilled as usual, then its own output tokens are its drafts, and the caller does not get them
again. A row's bits depend on that row alone, so every such draft is accepted and the output continues
unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compiled_mtp.plan import RowLogprobs


@dataclass(slots=True)
class KnownTokens:
    """The first output tokens of a request, as far as they are known before it emits them.

    num_planned: the fewest tokens that the device has emitted when every planned launch has run; exact below
    len(token_ids). uploaded: the drafts of the round planned last.
    """

    token_ids: Sequence[int]
    num_planned: int = 0
    uploaded: Sequence[int] = ()

    @property
    def is_planned(self) -> bool:
        """Whether every known token is planned."""
        return self.num_planned >= len(self.token_ids)

    @property
    def num_left(self) -> int:
        """How many known tokens are not planned yet."""
        return len(self.token_ids) - self.num_planned

    def plan_first(self) -> None:
        """Count the first token, whose launch is planned."""
        self.num_planned = 1

    def plan_round(self, verify: int) -> Sequence[int]:
        """Count a round that verifies `verify` drafts; return the known tokens for the first of these drafts,
        0 to `verify`."""
        begin = self.num_planned
        self.uploaded = self.token_ids[begin : begin + verify]
        self.num_planned = begin + len(self.uploaded) + 1
        return self.uploaded


@dataclass(slots=True)
class Replay:
    """How far the recomputation of a request's known output tokens has been read."""

    known: Sequence[int]
    num_compared: int = 0

    @property
    def is_over(self) -> bool:
        """Whether every known token was read again."""
        return self.num_compared == len(self.known)

    def compare(self, token_ids: Sequence[int]) -> int:
        """Compare the tokens of a result with the known ones; return how many of them were known.

        Raises ValueError, with its position, for a token that differs.
        """
        begin = self.num_compared
        known = self.known[begin : begin + len(token_ids)]
        for index, (old, new) in enumerate(zip(known, token_ids, strict=False)):
            if old != new:
                raise ValueError(
                    f"a replayed token must equal the original, got {new} for {old} at output token "
                    f"{begin + index}; on this machine a row's bits depend on its batch, raise num_blocks or "
                    "offload_gb so that no request is replayed"
                )
        self.num_compared = begin + len(known)
        return len(known)


def drop_rows(rows: RowLogprobs, count: int) -> RowLogprobs:
    """Return the log probabilities without the rows of the first `count` tokens."""
    return RowLogprobs(
        rows.logprobs[count:],
        rows.ranks[count:],
        rows.top_ids[count:],
        rows.top_logprobs[count:],
        rows.entropies[count:],
        None if rows.processed is None else drop_rows(rows.processed, count),
    )
