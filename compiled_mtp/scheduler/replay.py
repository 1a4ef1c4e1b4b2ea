"""Recomputes the tokens of a preempted request that was not offloaded; the caller does not get them again.

The prompt is prefilled as usual; then the request's own output tokens are the drafts of its rounds. A row's
bits depend on that row alone, so every such draft is accepted and the output continues unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compiled_mtp.plan import RowLogprobs


@dataclass(slots=True)
class Replay:
    """How far the recomputation of a request has come.

    known: the output tokens that the request had. num_planned: the fewest tokens that the device has
    recomputed when every planned launch has run; exact below len(known). num_compared: recomputed tokens that
    were read. uploaded: the drafts of the round planned last.
    """

    known: Sequence[int]
    num_planned: int = 0
    num_compared: int = 0
    uploaded: Sequence[int] = ()

    @property
    def is_over(self) -> bool:
        """Whether every known token was read again."""
        return self.num_compared == len(self.known)

    def plan_first(self) -> None:
        """Count the first token, whose launch is planned."""
        self.num_planned = 1

    def plan_round(self, verify: int) -> Sequence[int]:
        """Count a round that verifies `verify` drafts; return the known tokens for the first of these drafts,
        0 to `verify`."""
        begin = self.num_planned
        self.uploaded = self.known[begin : begin + verify]
        self.num_planned = begin + len(self.uploaded) + 1
        return self.uploaded

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
    """Return the log probabilities without those of the first `count` tokens."""
    return RowLogprobs(
        rows.logprobs[count:], rows.ranks[count:], rows.top_ids[count:], rows.top_logprobs[count:]
    )
