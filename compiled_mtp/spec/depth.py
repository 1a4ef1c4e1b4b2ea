"""Chooses how many tokens the next round drafts: the depth with the most expected tokens per second.

A depth costs time (a wider verify, more draft passes) and gains the drafts that are kept. The controller
learns both while the engine runs: a round's time by (depth, bucket, context class), and the tokens that a
round of each depth would give (`gains.py`). The depth changes no token. Pure Python.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Literal, TypeAlias

from compiled_mtp.spec.gains import Gains

Reason: TypeAlias = Literal["best", "probe", "retry", "only"]
"""Why a round has its depth: the most expected tokens per second; a probe of how often drafts are kept; a
retry that measures its time again; no other depth is ready."""

# A measurement is the least of _TRIES times of a depth, because other load and the work of a first round only
# ever slow a round down. Until the first measurement is complete, the estimated time is multiplied by _HOPE,
# so that a depth is tried where that could pay; if its rounds cannot be timed, for _MOST_HOPES comparisons.
_TRIES, _HOPE, _MOST_HOPES = 3, 0.93, 4
# The weight of a new measurement in the time of the depth in use, and the largest slowdown that counts of it.
# The weight of a slower measurement of another depth. A faster one replaces that depth's time, which was
# wrong.
_SHARE, _MOST_RISE, _RETRIED_SHARE = 0.3, 1.3, 0.5
# The part of a change in the time of the depth in use that is applied to all depths too; and the number of
# measurements after a switch of depth that change its own time alone, because that may have been wrong.
_COMMON, _OWN_MEASUREMENTS = 0.5, 5
# The most measurements that count in the weight of a depth's time.
_MOST_COUNT = 6
# Weights of a straight line fitted to the times of all depths: of the line beside a depth's own time, in
# measurements; of the usual slope in the fit, in measurements times a squared distance in depth.
_LINE_WEIGHT, _SLOPE_WEIGHT = 1.0, 7.0
# The time that one more draft adds, as a fraction of a round without drafts: before anything is measured, and
# the least that a fit may give.
_USUAL_SLOPE, _LEAST_SLOPE = 0.12, 0.02
# Another depth must be expected to be this much faster: two equal ones would alternate.
_MARGIN = 1.01
# Depths are compared once per _EARLY_HELD_ROUNDS in the first _FIRST_ROUNDS, when most is learnt; then once
# per _HELD_ROUNDS, to save host time; and once per _TRIED_ROUNDS while the chosen depth has no measurement.
_FIRST_ROUNDS, _EARLY_HELD_ROUNDS, _HELD_ROUNDS, _TRIED_ROUNDS = 128, 8, 24, 2
# A probe is two rounds, because the first has no drafts to verify; the interval between probes doubles up to
# _LAST_PROBE rounds, and probes are at most the part _MOST_PROBES of all rounds.
_PROBE_ROUNDS = 2
_FIRST_PROBE, _LAST_PROBE = 16, 1024
_MOST_PROBES = 0.01
# A retry lasts for one measurement; each interval between retries is _RETRY_GROWTH times the last.
_RETRY_ROUNDS = _TRIES
_FIRST_RETRY, _LAST_RETRY, _RETRY_GROWTH = 32, 1024, 4
# What retries may lose, in rounds of the chosen depth: a part of all rounds, and _EARLY_LOST at the start,
# when most is learnt. The loss per round is capped, else a time measured far too long would never be retried.
_MOST_LOST, _EARLY_LOST, _LARGEST_LOSS = 0.01, 1.0, 0.5


class _Time:
    """Seconds of a round by measurements, each the least of _TRIES times; infinite before the first time.

    count: the measurements that count, at least 1. tries: how many times of the first measurement were taken.
    least, number: the least and the number of the times of the current measurement. hopes: the comparisons
    that may still take the depth as faster than estimated. at: the round of the last time.
    """

    __slots__ = ("at", "count", "hopes", "least", "number", "seconds", "tries")

    def __init__(self) -> None:
        self.seconds, self.tries, self.count = math.inf, 0, 1
        self.least, self.number = math.inf, 0
        self.hopes, self.at = _MOST_HOPES, 0

    def begin(self) -> None:
        """Take the current times as the first measurement, complete or not."""
        self.tries, self.seconds = self.number, self.least
        if self.tries == _TRIES:
            self.least, self.number = math.inf, 0

    def begin_anew(self) -> None:
        """Drop the times of an incomplete measurement: they are too old to be compared with new ones."""
        if self.tries >= _TRIES:
            self.least, self.number = math.inf, 0

    def take_in(self, *, is_in_use: bool) -> float:
        """Count a complete measurement; return the factor by which it changes the time."""
        new, known = self.least, self.seconds
        self.least, self.number = math.inf, 0
        self.count = min(self.count + 1, _MOST_COUNT)
        if is_in_use:
            self.seconds += _SHARE * (min(new, _MOST_RISE * known) - known)
        else:
            self.seconds += (_RETRIED_SHARE if new > known else 1.0) * (new - known)
        return self.seconds / known


_Class: TypeAlias = tuple[Hashable, int]
"""Rounds with comparable times: bucket and context class."""


def context_class(tokens: int) -> int:
    """Return the class of a context length: 0 up to 4,096 tokens, one more for each doubling."""
    return max(0, (tokens - 1) // 4096).bit_length()


def context_span(tokens: int) -> tuple[int, int]:
    """Return the bounds of the length's class: lengths above the first number, up to the second."""
    most = 4096 << context_class(tokens)
    return (most // 2 if most > 4096 else -1), most


def first_depth(depths: Iterable[int]) -> int:
    """Return the depth to begin with: the middle one of those above 0."""
    ordered = sorted(depths)
    drafting = [depth for depth in ordered if depth] or ordered
    return drafting[len(drafting) // 2]


def _fit_line(times: Iterable[tuple[int, float, int]], usual: float) -> tuple[float, float]:
    """Fit a straight line to weighted times; return the seconds at depth 0 and of one more draft.

    times: (depth, seconds, weight), at least one. usual: the prior slope, as a fraction of the time at depth
    0.
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
    # The upper bound keeps the time at depth 0 from becoming negative.
    least, most = _LEAST_SLOPE * y / (1 + _LEAST_SLOPE * x), y / (1 + x)
    slope = min(max(slope / (sum_xx - x * sum_x + _SLOPE_WEIGHT), least), most)
    return y - slope * x, slope


def _believed(times: Mapping[int, _Time]) -> list[tuple[int, float, int]]:
    """Return (depth, seconds, weight) of measured depths, deepest first; without any, of all that were timed.

    Fewer drafts never take longer: such a time was measured wrongly and is lowered to the deeper one's.
    """
    found, most = [], math.inf
    for depth in sorted(times, reverse=True):
        known = times[depth]
        if known.tries >= _TRIES:
            if known.seconds < most:
                most = known.seconds
            found.append((depth, most, known.count))
    return found or [(depth, known.seconds, known.count) for depth, known in times.items() if known.tries]


class DepthController:
    """Chooses one depth per round for the whole batch, from `depths` that are ready to run.

    The time of a depth that was not timed is estimated from the other depths; the depth is tried, and timed,
    where that could pay. Raises ValueError for no depth or a negative one.
    """

    def __init__(self, depths: Iterable[int]) -> None:
        self.depths = tuple(sorted(set(depths)))
        if not self.depths or self.depths[0] < 0:
            raise ValueError(f"depths must be numbers of at least 0, got {self.depths}; name some")
        self._gains = Gains(self.depths)
        self._times: dict[_Class, dict[int, _Time]] = {}
        self._usual_slope = _USUAL_SLOPE
        # The tokens of recorded rounds that were not learnt from yet, by number of drafts.
        self._rounds_of: dict[int, list[Sequence[Sequence[int]]]] = {}
        self._held = 0
        # The class of the current rounds, and its times by depth.
        self._class: _Class | None = None
        self._times_here: dict[int, _Time] = {}
        # The best depth, and the neighbour that the rounds of a retry have instead.
        self.depth = first_depth(self.depths)
        self._retried: int | None = None
        # How many more measurements of the depth in use change its time alone.
        self._own_left = 0
        self.reason: Reason = "best"
        self._rounds = self._since_draft = self._probe_left = 0
        self._probe_after = _FIRST_PROBE
        self._retry_after, self._retry_at = _FIRST_RETRY, _FIRST_RETRY
        self._lost = 0.0
        self.num_probes = self.num_switches = 0

    def add_depth(self, depth: int) -> None:
        """Take one more depth, whose programs have become ready."""
        self.depths = tuple(sorted({*self.depths, depth}))
        self._gains.use(self.depths)
        self._held = 0

    def record_round(self, num_drafts: int, token_ids: Sequence[Sequence[int]]) -> None:
        """Record a round that verified `num_drafts` drafts per request.

        token_ids: the new tokens of each request, the accepted drafts and one more; none for a request that
        does not count.
        """
        rounds = self._rounds_of.get(num_drafts)
        if rounds is None:
            rounds = self._rounds_of[num_drafts] = []
        rounds.append(token_ids)

    def record_time(self, depth: int, bucket: Hashable, context: int, seconds: float) -> None:
        """Record the time of a round at `depth` during which no other launch ran."""
        round_class = (bucket, context)
        # Nearly always the class of the last comparison: an equality test is faster than a lookup.
        times = self._times_here if round_class == self._class else self._times.setdefault(round_class, {})
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
        """Return the depth of the next round, for a batch in `bucket` with contexts of that class."""
        self._rounds += 1
        round_class = (bucket, context)
        if self._held and round_class == self._class:
            self._held -= 1
        else:
            self._class, self._times_here = round_class, self._times.setdefault(round_class, {})
            self._learn()
            self._held = self._compare(round_class) - 1
        if self._retried is not None:
            return self._retried
        return self._probe() if not self.depth and self.reason != "only" else self.depth

    def _learn(self) -> None:
        """Learn the gains from the recorded rounds."""
        for num_drafts, rounds in self._rounds_of.items():
            if rounds:
                self._gains.learn(num_drafts, rounds)
                rounds.clear()

    def _compare(self, round_class: _Class) -> int:
        """Switch to the best depth, or retry another one; return for how many rounds."""
        self._retried, times = None, self._times_here
        if len(self.depths) == 1:
            self.depth, self.reason = self.depths[0], "only"
            return self._held_rounds()
        self.reason = "best"
        speeds = self.speeds(*round_class)
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
        if self._rounds >= self._retry_at:
            return self._retry(round_class, speeds)
        return self._held_rounds()

    def _held_rounds(self) -> int:
        """Return for how many rounds the best depth is kept."""
        return _HELD_ROUNDS if self._rounds > _FIRST_ROUNDS else _EARLY_HELD_ROUNDS

    def _retry(self, round_class: _Class, speeds: Mapping[int, float]) -> int:
        """Retry the neighbour of the chosen depth that was timed longest ago, if the loss is small enough.

        Without retries a depth whose time was measured too long would never be timed again. Returns for how
        many rounds.
        """
        at, times = self.depths.index(self.depth), self._times[round_class]
        neighbours = self.depths[max(at - 1, 0) : at] + self.depths[at + 1 : at + 2]
        other = min(neighbours, key=lambda depth: times[depth].at if depth in times else -1)
        # The first round after depth 0 also catches up, so it is not timed.
        rounds = _RETRY_ROUNDS + (not self.depth)
        loss = rounds * min(max(1 - speeds[other] / speeds[self.depth], 0.0), _LARGEST_LOSS)
        if self._lost + loss > _EARLY_LOST + _MOST_LOST * self._rounds:
            return self._held_rounds()
        self._lost += loss
        self._retried = other
        if other in times:
            times[other].begin_anew()
        self._retry_after = min(_RETRY_GROWTH * self._retry_after, _LAST_RETRY)
        self._retry_at = self._rounds + self._retry_after
        self.reason = "retry"
        return rounds

    def speeds(self, bucket: Hashable, context: int) -> dict[int, float]:
        """Return the expected tokens per second of one request at each depth, in a bucket and context class.

        All 0 while no time is known.
        """
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

    def _nearest(self, round_class: _Class) -> list[tuple[int, float, int]]:
        """Return the times of the class nearest to one without times: of the same bucket if there is one,
        then of the nearest context class, then of the latest.
        """
        bucket, context = round_class
        timed = [one for one, times in self._times.items() if any(known.tries for known in times.values())]
        if not timed:
            return []
        nearest = min(reversed(timed), key=lambda one: (one[0] != bucket, abs(one[1] - context)))
        return _believed(self._times[nearest])

    def _probe(self) -> int:
        """Return 0, or now and then the smallest depth above 0.

        At depth 0 only such probes show how often drafts would be kept. At most one round in a hundred is
        one.
        """
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
