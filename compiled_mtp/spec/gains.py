"""Estimates how many tokens a round of each depth would give, from rounds of the depths that ran.

Two estimates are combined. The first counts how often each draft is kept, by its number in the round; it
depends on where rounds began, and so on the depth that ran. The second replays the text. It assumes that a
token which was drafted correctly, or wrongly, would have been so from any other start of the round. So it
can count the rounds that each depth would have needed for the same tokens. No token depends on it. Pure
Python.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

# A round's weight halves after this many rounds of one request, in the counts by draft number and in the
# replayed text: long enough for a steady text, short enough to follow one that changes every few hundred
# tokens. With n requests the number of requests' rounds is sqrt(n) times as large.
_FAST_ROUNDS, _REPLAYED_ROUNDS = 24.0, 48.0
# The half-life, in observations, of the long-run counts; and their weight beside the recent counts.
_SLOW_ROUNDS, _SLOW_WEIGHT = 1000.0, 6.0
# The assumed rate of an untried draft, and its weight. It is high, because a try costs little and never
# trying may cost a lot.
_UNTRIED, _BELIEF_WEIGHT = 0.8, 8.0
# The most requests times rounds that one call counts, the latest; older ones would hardly weigh.
_MOST_SEEN = 96
# The most requests of a batch, and of their rounds per call, that are replayed, to save host time.
_REPLAYED, _MOST_REPLAYED = 4, 32
# The weight, in rounds, of the estimate by draft number beside the replayed one.
_BY_NUMBER_WEIGHT = 24.0


class Gains:
    """Estimates the tokens per round at each of `depths`, ascending, from the rounds that ran."""

    def __init__(self, depths: Sequence[int]) -> None:
        # [kept, tried] counts by the number of the draft, recent and in the long run.
        self._fast: list[list[float]] = []
        self._slow: list[list[float]] = []
        self.use(depths)

    def use(self, depths: Sequence[int]) -> None:
        """Estimate these depths from now on."""
        self._depths = depths
        missing = range(depths[-1] - len(self._fast))
        self._fast += [[0.0, 0.0] for _ in missing]
        self._slow += [[0.0, 0.0] for _ in missing]
        # The replayed text: its tokens, the ended rounds by depth, and the tokens of each request's open
        # round by depth.
        self._tokens = 0.0
        self._ended = [0.0 for depth in depths if depth]
        self._open = [[0 for depth in depths if depth] for _ in range(_REPLAYED)]
        # Expected number of hard tokens among those after fully kept rounds, less those already taken as
        # hard.
        self._owed = 0.0

    def learn(self, num_drafts: int, rounds: Sequence[Sequence[Sequence[int]]]) -> None:
        """Learn from the tokens of at least one round, each of which verified `num_drafts` drafts per
        request.
        """
        requests = len(rounds[-1]) or 1
        # Recent counts of drafts that were not tried fade too.
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
        # A request may have more than num_drafts + 1 tokens: the id 0 in the place of a missing draft was
        # right.
        fast_rounds = _FAST_ROUNDS * math.sqrt(requests)
        for index in range(num_drafts):
            kept = seen - lengths.count(index + 1)
            for rate, halved_by in ((self._fast[index], fast_rounds), (self._slow[index], _SLOW_ROUNDS)):
                fade = 0.5 ** (seen / halved_by)
                rate[:] = rate[0] * fade + kept, rate[1] * fade + seen
            seen = kept
        self._replay(num_drafts, rounds)

    def _replay(self, num_drafts: int, rounds: Sequence[Sequence[Sequence[int]]]) -> None:
        """Count the rounds that each depth would have needed for the tokens of these rounds."""
        requests = min(_REPLAYED, min(map(len, rounds)))
        # The token after a round that kept all drafts counts as drafted correctly as often as the next draft
        # is kept; `hard` is the rate at which it does not.
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
                # The last token is hard, which means that it ends a round of every depth.
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
        """Return how often each draft is kept, given that those before it were."""
        found, rate = [], _UNTRIED
        for (kept, seen), (all_kept, all_seen) in zip(self._fast, self._slow, strict=True):
            long_run = (all_kept + _BELIEF_WEIGHT * rate) / (all_seen + _BELIEF_WEIGHT)
            rate = (kept + _SLOW_WEIGHT * long_run) / (seen + _SLOW_WEIGHT)
            found.append(rate)
        return found

    def tokens(self) -> list[float]:
        """Return the tokens that a round of each depth is expected to give one request."""
        total = reached = 1.0
        by_number = [total]
        for rate in self._rates():
            reached *= rate
            total += reached
            by_number.append(total)
        ended = iter(self._ended)
        return [
            (self._tokens + _BY_NUMBER_WEIGHT * by_number[depth]) / (next(ended) + _BY_NUMBER_WEIGHT)
            if depth
            else 1.0
            for depth in self._depths
        ]
