"""Log probabilities on the host's side: an entry an emitted token, in step with its text. No torch.

The device gives, for each row, the chosen id's log probability and rank and a list of the likeliest ids. Here
they become entries, which are cut where the tokens are cut and shown when the text of their token is.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from compiled_mtp.plan import RowLogprobs


class TopLogprob(NamedTuple):
    """One of the likeliest ids at a position. bytes: of its text, none for special tokens."""

    token_id: int
    bytes: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One emitted token. rank counts from 1, the likeliest; of equally likely ids the lowest comes first.

    top holds the likeliest ids in that order, those that cannot be drawn left out: for processed logprobs it
    may be shorter than was asked. bytes: of the token's text, none for special tokens.
    """

    token_id: int
    bytes: bytes
    logprob: float
    rank: int
    top: tuple[TopLogprob, ...]


def make_entries(
    token_ids: Sequence[int], rows: RowLogprobs, num_top: int, token_bytes: Callable[[int], bytes]
) -> list[TokenLogprob]:
    """Return the entries of the tokens that a round kept: row i is that of token i, others are dropped."""
    entries = []
    for index, token_id in enumerate(token_ids):
        listed = zip(rows.top_ids[index][:num_top], rows.top_logprobs[index], strict=False)
        top = tuple(TopLogprob(one, token_bytes(one), value) for one, value in listed if value > -math.inf)
        entries.append(
            TokenLogprob(token_id, token_bytes(token_id), rows.logprobs[index], rows.ranks[index], top)
        )
    return entries


class LogprobQueue:
    """Entries of one request whose text is held back, as stop strings and halves of characters are.

    In all it gives back every entry that was added, in order: one for each emitted token.
    """

    def __init__(self) -> None:
        self._held: deque[tuple[int, TokenLogprob]] = deque()
        self._num_decoded = 0
        self._num_shown = 0

    def __iter__(self) -> Iterator[TokenLogprob]:
        return (entry for _, entry in self._held)

    def add(self, entry: TokenLogprob, num_characters: int) -> None:
        """Take a token's entry; num_characters: what the detokenizer gave for it."""
        self._num_decoded += num_characters
        self._held.append((self._num_decoded, entry))

    def take(self, num_shown: int) -> list[TokenLogprob]:
        """Return the entries of tokens whose text is shown whole, now that num_shown more characters are."""
        self._num_shown += num_shown
        ready = []
        while self._held and self._held[0][0] <= self._num_shown:
            ready.append(self._held.popleft()[1])
        return ready

    def flush(self) -> list[TokenLogprob]:
        """Return what is held, at the end of the request: a stop cuts text, not the tokens that made it."""
        ready = [entry for _, entry in self._held]
        self._held.clear()
        return ready
