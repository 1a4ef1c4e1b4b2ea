"""How many tokens to draft in the next round: the depth that is expected to give the most tokens a second.

A depth costs time (a wider verify, more draft passes) and pays by the drafts that are kept. Both are learnt
while the engine runs: a round's time by (depth, bucket, context class), and the tokens that a round of each
depth would give (`gains.py`). No token depends on it, whatever it chooses. Pure Python.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Literal, TypeAlias

from compiled_mtp.spec.gains import Gains

Reason: TypeAlias = Literal["best", "probe", "retry", "only"]
"""Why a round has its depth: it promises most, it is to show what drafts are worth, its time is to be
measured again, no other is ready."""

# Of so many times of a depth the least counts: a neighbour of the machine, or what a first round makes ready,
# only ever holds a round up. Before as many were taken the depth is said to be a little faster than it is
# estimated to be, so that it is tried where that could pay; but if its rounds cannot be timed, only for as
# many comparisons.
_TRIES, _HOPE, _MOST_HOPES = 3, 0.93, 4
# A new measurement's share in the time of the depth in use, the most by which it may seem slower, and its
# share if it is slower than what was known of a depth that was not in use: if it is faster, that was wrong.
_SHARE, _MOST_RISE, _RETRIED_SHARE = 0.3, 1.3, 0.5
# Of a change in the time of the depth in use, the part that is taken to be one of all depths; and of how many
# measurements it is none, once a depth has come into use: it may have, since its time was wrong.
_COMMON, _OWN_MEASUREMENTS = 0.5, 5
# The most measurements that count in the weight of a depth's time.
_MOST_COUNT = 6
# The weight, in measurements, of a straight line through the times of all depths beside a depth's own; that
# of the slope such lines have had, in measurements times the square of a distance in depth.
_LINE_WEIGHT, _SLOPE_WEIGHT = 1.0, 7.0
# What one more draft adds to a round, as a part of one without drafts: before anything is measured, and the
# least that is ever expected.
_USUAL_SLOPE, _LEAST_SLOPE = 0.12, 0.02
# Another depth is taken only if it promises this much more: two that are as good would alternate.
_MARGIN = 1.01
# What was recorded is taken in, and the depths are compared, once in so many rounds: of the first ones, when
# most is learnt, of later ones, for the host's sake, and while a depth's time is not believed yet.
_FIRST_ROUNDS, _EARLY_HELD_ROUNDS, _HELD_ROUNDS, _TRIED_ROUNDS = 128, 8, 24, 2
# A probe is two rounds, since the first has no drafts to verify; the interval between two doubles.
_PROBE_ROUNDS = 2
_FIRST_PROBE, _LAST_PROBE = 16, 1024
_MOST_PROBES = 0.01
# A retry is as many rounds as are taken in together; every interval between two is so many times the last.
_RETRY_ROUNDS = _TRIES
_FIRST_RETRY, _LAST_RETRY, _RETRY_GROWTH = 32, 1024, 4
# What retries may lose, in rounds of the chosen depth, is a share of all rounds and some at the start, when
# most is to be learnt. A time far too long would never be measured again, were its loss not bounded.
_MOST_LOST, _EARLY_LOST, _LARGEST_LOSS = 0.01, 1.0, 0.5


class _Time:
    """Seconds of a round, infinite before one was timed, by measurements: the least of several times each.

    count: how many measurements count in it, at the least 1; tries: how many of the times of the first one
    were taken; least, number: of the times of the one that is being made; hopes: for how many comparisons
    more the depth may be chosen in the hope that it is faster than estimated; at: the round of the last
    time."""

    __slots__ = ("at", "count", "hopes", "least", "number", "seconds", "tries")

    def __init__(self) -> None:
        self.seconds, self.tries, self.count = math.inf, 0, 1
        self.least, self.number = math.inf, 0
        self.hopes, self.at = _MOST_HOPES, 0

    def begin(self) -> None:
        """Count one more of the first times."""
        self.tries, self.seconds = self.number, self.least
        if self.tries == _TRIES:
            self.least, self.number = math.inf, 0

    def begin_anew(self) -> None:
        """Drop what is there of a measurement: its times are older than those to come."""
        if self.tries >= _TRIES:
            self.least, self.number = math.inf, 0

    def take_in(self, *, is_in_use: bool) -> float:
        """Count the measurement that is complete; by what it changes what was known."""
        new, known = self.least, self.seconds
        self.least, self.number = math.inf, 0
        self.count = min(self.count + 1, _MOST_COUNT)
        if is_in_use:
            self.seconds += _SHARE * (min(new, _MOST_RISE * known) - known)
        else:
            self.seconds += (_RETRIED_SHARE if new > known else 1.0) * (new - known)
        return self.seconds / known


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


def _fit_line(times: Iterable[tuple[int, float, int]], usual: float) -> tuple[float, float]:
    """Seconds at depth 0 and of one more draft, by the straight line nearest to the times, by their weights.

    times: depths, their seconds and weights, at least one. usual: what a draft adds to a round without
    drafts, as a part of it, where the times say little of that.
    """
    weight = sum_x = sum_y = sum_xx = sum_xy = 0.0
    for depth, seconds, count in times:
        weight += count
        sum_x += count * depth
        sum_y += count * seconds
        sum_xx += count * depth * depth
        sum_xy += count * depth * seconds
    x, y = sum_x / weight, sum_y / weight
    slope = sum_xy - x * sum_y + _SLOPE_WEIGHT * usual * y / (1 + usual * x)
    # Never so steep that a round without drafts would take no time.
    least, most = _LEAST_SLOPE * y / (1 + _LEAST_SLOPE * x), y / (1 + x)
    slope = min(max(slope / (sum_xx - x * sum_x + _SLOPE_WEIGHT), least), most)
    return y - slope * x, slope


def _believed(times: Mapping[int, _Time]) -> list[tuple[int, float, int]]:
    """Depths, the deepest first, with their seconds and weights: those that are believed, or if there is
    none, those that there are. Fewer drafts never take longer: a time that says so was measured wrongly."""
    found, most = [], math.inf
    for depth in sorted(times, reverse=True):
        known = times[depth]
        if known.tries >= _TRIES:
            if known.seconds < most:
                most = known.seconds
            found.append((depth, most, known.count))
    return found or [(depth, known.seconds, known.count) for depth, known in times.items() if known.tries]


class DepthController:
    """Chooses one depth a round for the whole batch, from `depths` that are ready to run.

    A round's time at a depth that was not timed is estimated from its neighbours; the depth is tried where it
    could pay, and measured. Raises ValueError for no depth or a negative one.
    """

    def __init__(self, depths: Iterable[int]) -> None:
        self.depths = tuple(sorted(set(depths)))
        if not self.depths or self.depths[0] < 0:
            raise ValueError(f"depths must be numbers from 0 on, at least one, got {self.depths}; name some")
        self._gains = Gains(self.depths)
        self._times: dict[_Class, dict[int, _Time]] = {}
        self._usual_slope = _USUAL_SLOPE
        # The tokens of rounds that are not yet taken in, by their number of drafts.
        self._rounds_of: dict[int, list[Sequence[Sequence[int]]]] = {}
        self._held = 0
        # Where rounds are now, and the times that were taken there.
        self._place: _Class | None = None
        self._times_here: dict[int, _Time] = {}
        # The depth that promises most, and the neighbour that rounds have instead while it is retried.
        self.depth = first_depth(self.depths)
        self._retried: int | None = None
        # Of the depth in use, the measurements to come that change its time alone.
        self._own_left = 0
        self.reason: Reason = "best"
        self._rounds = self._since_draft = self._probe_left = 0
        self._probe_after = _FIRST_PROBE
        self._retry_after, self._retry_at = _FIRST_RETRY, _FIRST_RETRY
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
        rounds = self._rounds_of.get(num_drafts)
        if rounds is None:
            rounds = self._rounds_of[num_drafts] = []
        rounds.append(token_ids)

    def record_time(self, depth: int, bucket: Hashable, context: int, seconds: float) -> None:
        """Take the time of a round that verified and drafted at `depth`, with no other launch beside it."""
        place = (bucket, context)
        # Of the same place as the last comparison, nearly always: comparing is quicker than looking up.
        times = self._times_here if place == self._place else self._times.setdefault(place, {})
        known = times.get(depth)
        if known is None:
            known = times[depth] = _Time()
        known.at = self._rounds
        known.number += 1
        if seconds < known.least:
            known.least = seconds
        if known.tries < _TRIES:
            known.begin()
        elif known.number == _TRIES:
            is_in_use = depth == self.depth
            change = known.take_in(is_in_use=is_in_use)
            if is_in_use and self._own_left:
                self._own_left -= 1
            elif is_in_use:
                common = 1 + _COMMON * (change - 1)
                for other in times.values():
                    if other is not known:
                        other.seconds *= common

    def choose(self, bucket: Hashable, context: int) -> int:
        """The depth of the next round, for a batch in `bucket` whose contexts are of that class."""
        self._rounds += 1
        place = (bucket, context)
        if self._held and place == self._place:
            self._held -= 1
        else:
            self._place, self._times_here = place, self._times.setdefault(place, {})
            self._learn()
            self._held = self._compare(place) - 1
        if self._retried is not None:
            self.num_retries += 1
            return self._retried
        return self._probe() if not self.depth and self.reason != "only" else self.depth

    def _learn(self) -> None:
        """Take in what was recorded."""
        for num_drafts, rounds in self._rounds_of.items():
            if rounds:
                self._gains.learn(num_drafts, rounds)
                rounds.clear()

    def _compare(self, place: _Class) -> int:
        """Go over to the depth that promises most, or retry another; for how many rounds."""
        self._retried, times = None, self._times_here
        if len(self.depths) == 1:
            self.depth, self.reason = self.depths[0], "only"
            return self._held_rounds()
        self.reason = "best"
        speeds = self.speeds(*place)
        best = self.depth
        most = speeds[best] * _MARGIN
        for depth, speed in speeds.items():
            if speed > most:
                best, most = depth, speed
        if best:
            self._since_draft, self._probe_after, self._probe_left = 0, _FIRST_PROBE, 0
        known = times.get(best)
        if known is None:
            known = times[best] = _Time()
        if best != self.depth:
            self.depth = best
            self.num_switches += 1
            self._own_left = _OWN_MEASUREMENTS
            known.begin_anew()
            self._retry_after = _FIRST_RETRY
            self._retry_at = self._rounds + self._retry_after
        if known.tries < _TRIES:
            known.hopes -= 1
            return _TRIED_ROUNDS
        if best and self._rounds >= self._retry_at:
            return self._retry(place, speeds)
        return self._held_rounds()

    def _held_rounds(self) -> int:
        """For how many rounds a depth is kept that promises most."""
        return _HELD_ROUNDS if self._rounds > _FIRST_ROUNDS else _EARLY_HELD_ROUNDS

    def _retry(self, place: _Class, speeds: Mapping[int, float]) -> int:
        """Let the next rounds have the neighbour of the chosen depth that was not timed for longest, if that
        does not cost too much: a time that was measured wrongly would never be measured again."""
        at, times = self.depths.index(self.depth), self._times[place]
        neighbours = self.depths[max(at - 1, 0) : at] + self.depths[at + 1 : at + 2]
        other = min(neighbours, key=lambda depth: times[depth].at if depth in times else -1)
        loss = _RETRY_ROUNDS * min(max(1 - speeds[other] / speeds[self.depth], 0.0), _LARGEST_LOSS)
        if self._lost + loss > _EARLY_LOST + _MOST_LOST * self._rounds:
            return self._held_rounds()
        self._lost += loss
        self._retried = other
        if other in times:
            times[other].begin_anew()
        self._retry_after = min(_RETRY_GROWTH * self._retry_after, _LAST_RETRY)
        self._retry_at = self._rounds + self._retry_after
        self.reason = "retry"
        return _RETRY_ROUNDS

    def speeds(self, bucket: Hashable, context: int) -> dict[int, float]:
        """Of each depth the tokens a second that one request is expected to gain in a bucket and class of
        contexts; 0 while no time is known."""
        here = self._times.get((bucket, context), {})
        times = _believed(here)
        believed_s = {depth: (seconds, count) for depth, seconds, count in times}
        times = times or self._nearest((bucket, context))
        if not times:
            return dict.fromkeys(self.depths, 0.0)
        base, slope = _fit_line(times, self._usual_slope)
        if len(times) > 1:
            self._usual_slope = slope / base
        speeds = {}
        for depth, total in zip(self.depths, self._gains.tokens(), strict=True):
            seconds, known = base + slope * depth, here.get(depth)
            if known is not None and known.tries >= _TRIES:
                own, count = believed_s[depth]
                seconds = (count * own + _LINE_WEIGHT * seconds) / (count + _LINE_WEIGHT)
            elif known is None:
                seconds *= _HOPE
            else:
                seconds = min(seconds, known.seconds) * (_HOPE if known.hopes > 0 else 1.0)
            speeds[depth] = total / seconds
        return speeds

    def _nearest(self, place: _Class) -> list[tuple[int, float, int]]:
        """The times of the class that is most like one where nothing was timed: of the same bucket if there
        is one, at the least distance in context, and of the latest."""
        bucket, context = place
        timed = [one for one, times in self._times.items() if any(known.tries for known in times.values())]
        if not timed:
            return []
        nearest = min(reversed(timed), key=lambda one: (one[0] != bucket, abs(one[1] - context)))
        return _believed(self._times[nearest])

    def _probe(self) -> int:
        """0, or now and then the shallowest depth that drafts: at depth 0 nothing else tells what drafts are
        worth. No more than one round in a hundred is spent."""
        self._since_draft += 1
        self.reason = "best"
        if not self._probe_left:
            is_due = self._since_draft >= self._probe_after
            if not is_due or self.num_probes + _PROBE_ROUNDS > _MOST_PROBES * self._rounds:
                return 0
            self._probe_left = _PROBE_ROUNDS
            self._probe_after = min(2 * self._probe_after, _LAST_PROBE)
        self._probe_left -= 1
        self._since_draft = 0
        self.num_probes += 1
        self.reason = "probe"
        return next(depth for depth in self.depths if depth)
