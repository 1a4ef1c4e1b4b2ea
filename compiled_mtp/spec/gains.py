"""How many tokens a round of each depth would give, learnt from rounds of the depths that ran.

Two estimates are put together. One counts how often each draft is kept, by its number; where drafts fail then
depends on where rounds begin, and so on the depth that ran. The other replays the text: a token that was
drafted rightly would have been from another beginning too, and one at which a draft failed would have failed,
so the rounds that every depth would have had can be counted. No token depends on it. Pure Python.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

# A round's weight halves after so many rounds of one request, in the drafts' numbers and in the replayed
# text: long enough for a steady text, short enough to follow one that changes every few hundred tokens. With
# more requests it halves after as many more of their rounds as the square root of their number.
_FAST_ROUNDS, _REPLAYED_ROUNDS = 24.0, 48.0
# The same, in observations, for what has been seen so far; and its weight beside what was seen lately.
_SLOW_ROUNDS, _SLOW_WEIGHT = 1000.0, 6.0
# The rate that an untried draft is taken to have, and its weight: a try costs little, never trying may cost
# a lot.
_UNTRIED, _BELIEF_WEIGHT = 0.8, 8.0
# Of what is taken in at once, requests times rounds, the latest that count: what is older hardly would.
_MOST_SEEN = 96
# The first requests of a batch are replayed, and so many of their rounds at once, to save the host's time.
_REPLAYED, _MOST_REPLAYED = 4, 32
# The weight, in rounds, of what the drafts' numbers foretell beside what was replayed.
_FORETOLD_WEIGHT = 24.0


class Gains:
    """What drafts give at each of the `depths`, ascending: learnt from rounds, foretold for all."""

    def __init__(self, depths: Sequence[int]) -> None:
        # By the number of the draft: how often it was tried and kept, lately and in the long run.
        self._fast: list[list[float]] = []
        self._slow: list[list[float]] = []
        self.use(depths)

    def use(self, depths: Sequence[int]) -> None:
        """Foretell these depths from now on."""
        self._depths = depths
        missing = range(depths[-1] - len(self._fast))
        self._fast += [[0.0, 0.0] for _ in missing]
        self._slow += [[0.0, 0.0] for _ in missing]
        # Of the replayed text: its tokens, and by depth the rounds that ended and the tokens of each
        # request's open one.
        self._tokens = 0.0
        self._ended = [0.0 for depth in depths if depth]
        self._open = [[0 for depth in depths if depth] for _ in range(_REPLAYED)]
        # By how much fewer of the tokens behind whole rounds were taken to be hard than are believed to be.
        self._owed = 0.0

    def learn(self, num_drafts: int, rounds: Sequence[Sequence[Sequence[int]]]) -> None:
        """Take in rounds, at least one, that verified `num_drafts` drafts of each request: their tokens."""
        requests = len(rounds[-1]) or 1
        # What was seen lately of drafts that were not tried is less and less of late.
        fade = 0.5 ** (len(rounds) / _FAST_ROUNDS)
        for fast in self._fast[num_drafts:]:
            fast[:] = fast[0] * fade, fast[1] * fade
        fade = 0.5 ** (len(rounds) * math.sqrt(min(requests, _REPLAYED)) / _REPLAYED_ROUNDS)
        self._tokens *= fade
        self._ended = [ended * fade for ended in self._ended]
        if not num_drafts:
            return
        late = rounds[-(_MOST_SEEN // requests or 1) :]
        lengths = bytes([len(new) for token_ids in late for new in token_ids])
        seen = len(lengths) - lengths.count(0)
        # More tokens than num_drafts + 1: what stood where a draft was missing was right.
        fast_rounds = _FAST_ROUNDS * math.sqrt(requests)
        for index in range(num_drafts):
            kept = seen - lengths.count(index + 1)
            for rate, halved_by in ((self._fast[index], fast_rounds), (self._slow[index], _SLOW_ROUNDS)):
                fade = 0.5 ** (seen / halved_by)
                rate[:] = rate[0] * fade + kept, rate[1] * fade + seen
            seen = kept
        self._replay(num_drafts, rounds)

    def _replay(self, num_drafts: int, rounds: Sequence[Sequence[Sequence[int]]]) -> None:
        """Count the rounds that each depth would have had for the tokens of these."""
        requests = min(_REPLAYED, min(map(len, rounds)))
        # The token behind a round whose drafts were all kept is right as often as the next draft is kept.
        hard = 1 - self._rates()[: num_drafts + 1][-1]
        ended, owed, tokens = self._ended, self._owed, 0
        widths = [depth + 1 for depth in self._depths if depth]
        for row in range(requests):
            kept, right = self._open[row], 0
            for token_ids in rounds[-(_MOST_REPLAYED // requests) :]:
                length = len(token_ids[row])
                tokens += length
                right += length
                if length > num_drafts:
                    owed += hard
                    if owed < 1.0:
                        continue
                    owed -= 1.0
                elif not length:
                    continue
                # The last token is hard: it ends a round of every depth.
                for index, width in enumerate(widths):
                    ended[index] += (kept[index] + right - 1) // width + 1
                    kept[index] = 0
                right = 0
            for index, width in enumerate(widths):
                whole, kept[index] = divmod(kept[index] + right, width)
                ended[index] += whole
        self._tokens += tokens
        self._owed = owed

    def _rates(self) -> list[float]:
        """How often each draft is kept, given that those before it were."""
        found, rate = [], _UNTRIED
        for (kept, seen), (all_kept, all_seen) in zip(self._fast, self._slow, strict=True):
            long_run = (all_kept + _BELIEF_WEIGHT * rate) / (all_seen + _BELIEF_WEIGHT)
            rate = (kept + _SLOW_WEIGHT * long_run) / (seen + _SLOW_WEIGHT)
            found.append(rate)
        return found

    def tokens(self) -> list[float]:
        """Of each depth the tokens that a round is expected to give one request."""
        total = reached = 1.0
        foretold = [total]
        for rate in self._rates():
            reached *= rate
            total += reached
            foretold.append(total)
        ended = iter(self._ended)
        return [
            (self._tokens + _FORETOLD_WEIGHT * foretold[depth]) / (next(ended) + _FORETOLD_WEIGHT)
            if depth
            else 1.0
            for depth in self._depths
        ]
