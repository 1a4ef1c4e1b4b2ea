"""Log probabilities on the host: one entry per emitted token, in step with the token's text. No torch.

The device gives, for each row, the chosen id's log probability and rank and a list of the likeliest ids. This
module turns them into entries, cuts entries where tokens are cut, and shows an entry with its token's text.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from compiled_mtp.plan import RowLogprobs
from compiled_mtp.sampling.parameter_checks import LogprobsMode


class TopLogprob(NamedTuple):
    """One of the likeliest ids at a position. bytes: of its text, empty for special tokens."""

    token_id: int
    bytes: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log probability of one emitted token.

    rank: 1 for the likeliest id; of equally likely ids the lowest comes first. top: the likeliest ids in that
    order without those that cannot be drawn, so processed logprobs may list fewer than the request asks for.
    bytes: of the token's text, empty for special tokens. entropy: the entropy of the position's distribution,
    in nats. processed: with logprobs_mode "both", the entry after masks, temperature and filters.
    """

    token_id: int
    bytes: bytes
    logprob: float
    rank: int
    top: tuple[TopLogprob, ...]
    entropy: float
    processed: TokenLogprob | None = None


def make_entries(
    token_ids: Sequence[int],
    rows: RowLogprobs,
    num_top: int,
    token_bytes: Callable[[int], bytes],
    mode: LogprobsMode = "raw",
) -> list[TokenLogprob]:
    """Return the entries of the tokens that a round kept: token i has row i; later rows are dropped.

    With mode "processed" or "both", rows.processed must be given.
    """
    others: list[TokenLogprob] | None = None
    if mode != "raw":
        assert rows.processed is not None
        others = make_entries(token_ids, rows.processed, num_top, token_bytes)
        if mode == "processed":
            return others
    entries = []
    for index, token_id in enumerate(token_ids):
        listed = zip(rows.top_ids[index][:num_top], rows.top_logprobs[index], strict=False)
        top = tuple(TopLogprob(one, token_bytes(one), value) for one, value in listed if value > -math.inf)
        entries.append(
            TokenLogprob(
                token_id,
                token_bytes(token_id),
                rows.logprobs[index],
                rows.ranks[index],
                top,
                rows.entropies[index],
                None if others is None else others[index],
            )
        )
    return entries


class LogprobQueue:
    """Holds back entries of one request until all of their text is shown.

    Text is held back while it may begin a stop string or ends in part of a character. The queue returns
    every added entry once, in order.
    """

    def __init__(self) -> None:
        self._held: deque[tuple[int, TokenLogprob]] = deque()
        self._num_decoded = 0
        self._num_shown = 0

    def __iter__(self) -> Iterator[TokenLogprob]:
        return (entry for _, entry in self._held)

    def add(self, entry: TokenLogprob, num_characters: int) -> None:
        """Add a token's entry; num_characters: length of the text that the detokenizer returned for it."""
        self._num_decoded += num_characters
        self._held.append((self._num_decoded, entry))

    def take(self, num_shown: int) -> list[TokenLogprob]:
        """Count num_shown more characters as shown; return the entries whose text is now shown whole."""
        self._num_shown += num_shown
        ready = []
        while self._held and self._held[0][0] <= self._num_shown:
            ready.append(self._held.popleft()[1])
        return ready

    def flush(self) -> list[TokenLogprob]:
        """Return the held entries at the request's end: a stop string cuts text, but keeps its tokens."""
        ready = [entry for _, entry in self._held]
        self._held.clear()
        return ready
