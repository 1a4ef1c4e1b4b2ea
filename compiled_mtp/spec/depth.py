"""How many tokens to draft in the next round: the depth that is expected to give the most tokens a second.

A depth costs time (a wider verify, more draft passes) and pays by the drafts that are kept. Both are learnt
while the engine runs: a round's time by (depth, bucket, context class), and the tokens that a round of each
depth would give (`gains.py`). No token depends on it. Pure Python.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Literal, TypeAlias

from compiled_mtp.spec.gains import Gains

Reason: TypeAlias = Literal["best", "probe", "retry", "only"]
"""Why a round has its depth: it promises most, it is to show what drafts are worth, its time is to be
measured again, no other is ready."""

# Of so many times the least is one measurement: a neighbour of the machine, or what a first round makes
# ready, only ever holds a round up.
_TRIES = 3
# A depth with fewer times is taken to be a little faster than estimated, so that it is tried where that could
# pay; but if its rounds cannot be timed, only in so many comparisons.
_HOPE, _MOST_HOPES = 0.93, 4
# A new measurement's share in a depth's time, and the most by which it may seem slower. One that is faster
# than that part of the time replaces it: the time was wrong.
_SHARE, _MOST_RISE, _WRONG_FALL = 0.3, 1.3, 0.9
# What one more draft adds to a round, as a part of one without drafts: before anything is measured, and the
# least and most that is ever expected.
_USUAL_SLOPE, _LEAST_SLOPE, _MOST_SLOPE = 0.12, 0.02, 0.5
# Another depth is taken only if it promises this much more: two that are as good would alternate.
_MARGIN = 1.01
# What was recorded is taken in, and the depths are compared, once in so many rounds: of the first ones, when
# most is learnt, of later ones, to save the host's time, and while a depth is being tried.
_FIRST_ROUNDS, _EARLY_HELD_ROUNDS, _HELD_ROUNDS, _TRIED_ROUNDS = 128, 8, 24, 2
# A probe is two rounds, since the first has no drafts to verify; a retry is one measurement. The interval
# between two of either doubles, up to the last. Probes are at most a share of all rounds.
_PROBE_ROUNDS, _FIRST_PROBE, _MOST_PROBES = 2, 16, 0.01
_FIRST_RETRY, _LAST_INTERVAL = 20, 1024
# What retries may lose, in rounds of the chosen depth, is a share of all rounds and some at the start, when
# most is to be learnt; a round is taken to lose no more than the last number, or a time far too long would
# never be measured again.
_MOST_LOST, _EARLY_LOST, _LARGEST_LOSS = 0.01, 1.0, 0.5


class _Time:
    """Seconds of a round at one depth, infinite before one was timed.

    tries: how many times of the first measurement were taken; least, number: of the times of the present
    one; hopes: in how many comparisons more the depth may be chosen in the hope that it is faster than
    estimated; at: the round of the last time."""

    __slots__ = ("at", "hopes", "least", "number", "seconds", "tries")

    def __init__(self) -> None:
        self.seconds = self.least = math.inf
        self.tries = self.number = self.at = 0
        self.hopes = _MOST_HOPES

    def add(self, seconds: float) -> None:
        """Count one more round."""
        self.number += 1
        if seconds < self.least:
            self.least = seconds
        if self.tries < _TRIES:
            self.tries, self.seconds = self.number, self.least
        elif self.number == _TRIES:
            if self.least < _WRONG_FALL * self.seconds:
                self.seconds = self.least
            else:
                self.seconds += _SHARE * (min(self.least, _MOST_RISE * self.seconds) - self.seconds)
        if self.number == _TRIES:
            self.least, self.number = math.inf, 0


_Class: TypeAlias = tuple[Hashable, int]
"""Rounds whose times compare: bucket, and class of the contexts' length."""


def context_class(tokens: int) -> int:
    """The class of a context's length: 0 up to 4,096 tokens, one more for each doubling."""
    return max(0, (tokens - 1) // 4096).bit_length()


def context_span(tokens: int) -> tuple[int, int]:
    """The lengths of a context's class: above the first, up to the second."""
    most = 4096 << context_class(tokens)
    return (most // 2 if most > 4096 else -1), most


def first_depth(depths: Iterable[int]) -> int:
    """The depth to begin with: the middle one of those that draft."""
    ordered = sorted(depths)
    drafting = [depth for depth in ordered if depth] or ordered
    return drafting[len(drafting) // 2]


class DepthController:
    """Chooses one depth a round for the whole batch, from `depths` that are ready to run.

    A round's time at a depth that was not timed is estimated from the nearest depth that was. Raises
    ValueError for no depth or a negative one.
    """

    def __init__(self, depths: Iterable[int]) -> None:
        self.depths = tuple(sorted(set(depths)))
        if not self.depths or self.depths[0] < 0:
            raise ValueError(f"depths must be numbers from 0 on, at least one, got {self.depths}; name some")
        self._gains = Gains(self.depths)
        self._times: dict[_Class, dict[int, _Time]] = {}
        self._slope = _USUAL_SLOPE
        # The tokens of rounds that are not yet taken in, by their number of drafts.
        self._rounds_of: dict[int, list[Sequence[Sequence[int]]]] = {}
        # For how many rounds more the last comparison counts, and where rounds were then.
        self._held = 0
        self._place: _Class | None = None
        # The depth that promises most, and the one that rounds have instead in a probe or retry.
        self.depth = first_depth(self.depths)
        self._other: int | None = None
        self.reason: Reason = "best"
        self._rounds = 0
        # The next probe or retry: its round, and the interval before it.
        self._other_at = self._interval = _FIRST_RETRY
        self._lost = 0.0
        self.num_probes = self.num_retries = self.num_switches = 0

    def add_depth(self, depth: int) -> None:
        """Take one more depth, whose programs have become ready."""
        self.depths = tuple(sorted({*self.depths, depth}))
        self._gains.use(self.depths)
        self._held = 0

    def record_round(self, num_drafts: int, token_ids: Sequence[Sequence[int]]) -> None:
        """Count a round that verified `num_drafts` drafts of each request and gave it these tokens: those
        that were kept and one more; none for a request that is not to be counted."""
        self._rounds_of.setdefault(num_drafts, []).append(token_ids)

    def record_time(self, depth: int, bucket: Hashable, context: int, seconds: float) -> None:
        """Take the time of a round that verified and drafted at `depth`, with no other launch beside it."""
        times = self._times.setdefault((bucket, context), {})
        known = times.get(depth)
        if known is None:
            known = times[depth] = _Time()
        known.at = self._rounds
        known.add(seconds)

    def choose(self, bucket: Hashable, context: int) -> int:
        """The depth of the next round, for a batch in `bucket` whose contexts are of that class."""
        self._rounds += 1
        place = (bucket, context)
        if not self._held or place != self._place:
            self._place = place
            for num_drafts, rounds in self._rounds_of.items():
                if rounds:
                    self._gains.learn(num_drafts, rounds)
                    rounds.clear()
            self._held = self._compare(place)
        self._held -= 1
        if self._other is None:
            return self.depth
        if self.reason == "probe":
            self.num_probes += 1
        else:
            self.num_retries += 1
        return self._other

    def _compare(self, place: _Class) -> int:
        """Go over to the depth that promises most, or try another; return for how many rounds."""
        self._other, self.reason = None, "best"
        if len(self.depths) == 1:
            self.reason = "only"
            return _HELD_ROUNDS
        speeds = self.speeds(*place)
        best = max(self.depths, key=speeds.__getitem__)
        if speeds[best] > speeds[self.depth] * _MARGIN:
            self.depth = best
            self.num_switches += 1
            self._interval = _FIRST_RETRY if best else _FIRST_PROBE
            self._other_at = self._rounds + self._interval
        known = self._times.setdefault(place, {}).setdefault(self.depth, _Time())
        if known.tries < _TRIES:
            known.hopes -= 1
            return _TRIED_ROUNDS
        if self._rounds >= self._other_at:
            self._try_other(place, speeds)
            if self._other is not None:
                return _TRIES if self.depth else _PROBE_ROUNDS
        return _HELD_ROUNDS if self._rounds > _FIRST_ROUNDS else _EARLY_HELD_ROUNDS

    def _try_other(self, place: _Class, speeds: Mapping[int, float]) -> None:
        """Let the next rounds have the neighbour of the chosen depth that was not timed for longest, if that
        does not cost too much: a time that was measured wrongly would never be measured again, and at depth 0
        nothing else tells what drafts are worth."""
        at, times = self.depths.index(self.depth), self._times[place]
        neighbours = self.depths[max(at - 1, 0) : at] + self.depths[at + 1 : at + 2]
        other = min(neighbours, key=lambda depth: times[depth].at if depth in times else -1)
        if self.depth:
            loss = _TRIES * min(max(1 - speeds[other] / speeds[self.depth], 0.0), _LARGEST_LOSS)
            if self._lost + loss > _EARLY_LOST + _MOST_LOST * self._rounds:
                return
            self._lost += loss
        elif self.num_probes + _PROBE_ROUNDS > _MOST_PROBES * self._rounds:
            return
        self._other, self.reason = other, "retry" if self.depth else "probe"
        self._interval = min(2 * self._interval, _LAST_INTERVAL)
        self._other_at = self._rounds + self._interval

    def speeds(self, bucket: Hashable, context: int) -> dict[int, float]:
        """Of each depth the tokens a second that one request is expected to gain in a bucket and class of
        contexts; 0 while no time is known."""
        times = self._times.get((bucket, context), {})
        timed = {depth: known.seconds for depth, known in times.items() if known.tries}
        if not timed:
            return dict.fromkeys(self.depths, 0.0)
        low, high = min(timed), max(timed)
        if low < high:
            rise = (timed[high] - timed[low]) / (high - low)
            # Never so steep that a round without drafts would take no time.
            base = max(timed[low] - low * rise, timed[low] / (1 + _MOST_SLOPE * low))
            self._slope = min(max(rise / base, _LEAST_SLOPE), _MOST_SLOPE)
        speeds = {}
        for depth, tokens in zip(self.depths, self._gains.tokens(), strict=True):
            known = times.get(depth)
            if known is not None and known.tries == _TRIES:
                seconds = known.seconds
            else:
                near = min(timed, key=lambda other: abs(other - depth))
                seconds = timed[near] * (1 + self._slope * depth) / (1 + self._slope * near)
                seconds *= _HOPE if known is None or known.hopes > 0 else 1.0
            speeds[depth] = tokens / seconds
        return speeds
