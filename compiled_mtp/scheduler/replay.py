"""A request that lost its place and could not be copied out: its tokens are computed anew, not told again.

Its prompt is prefilled as usual; then its own tokens are the drafts of its rounds. A row's bits depend on
that row alone, so that each of them is accepted, and what follows is what would have followed before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compiled_mtp.plan import RowLogprobs


@dataclass(slots=True)
class Replay:
    """How far a request has come again.

    known: the output tokens that were told. num_planned: tokens that the device has for certain when every
    launch planned so far has run; exact below len(known). num_compared: tokens that were read again.
    uploaded: the drafts of the round that was planned last.
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
        """The launch that emits the first token is planned."""
        self.num_planned = 1

    def plan_round(self, verify: int) -> Sequence[int]:
        """Return what a round of that many drafts is to verify first, maybe nothing; it is planned."""
        begin = self.num_planned
        self.uploaded = self.known[begin : begin + verify]
        self.num_planned = begin + len(self.uploaded) + 1
        return self.uploaded

    def compare(self, token_ids: Sequence[int]) -> int:
        """Take the tokens of a result; return how many of them, from the first, are known.

        Raises ValueError, naming the place, for one that is not what it was.
        """
        begin = self.num_compared
        known = self.known[begin : begin + len(token_ids)]
        for index, (old, new) in enumerate(zip(known, token_ids, strict=False)):
            if old != new:
                raise ValueError(
                    f"a replayed token must be what it was, got {new} for {old} at output token "
                    f"{begin + index}; rows depend on their company here, raise num_blocks or offload_gb so "
                    "that nothing is replayed"
                )
        self.num_compared = begin + len(known)
        return len(known)


def drop_rows(rows: RowLogprobs, count: int) -> RowLogprobs:
    """The log probabilities without those of the first `count` tokens."""
    return RowLogprobs(
        rows.logprobs[count:], rows.ranks[count:], rows.top_ids[count:], rows.top_logprobs[count:]
    )
