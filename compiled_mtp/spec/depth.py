"""How many tokens to draft in the next round: the depth that is expected to give the most tokens a second.

A depth costs time (a wider verify, more draft passes) and pays by the drafts that are kept. Both are learnt
while the engine runs: a round's time by (depth, bucket, context class), and how often each draft is kept,
given that the ones before it were. No token depends on it, whatever it chooses. Pure Python.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Literal, TypeAlias

Reason: TypeAlias = Literal["best", "probe", "only"]
"""Why a round has its depth: it promises most, it is to show what drafts are worth, no other is ready."""

# A round's weight halves after so many rounds of one request: long enough for a steady text, short enough to
# follow one that changes every few hundred tokens.
_FAST_ROUNDS = 24.0
_SLOW_ROUNDS = 1000.0
# Of what is taken in at once, requests times rounds, the latest that count: what is older hardly would.
_MOST_SEEN = 96
# The weight, in rounds, of what has been seen so far beside what was seen lately.
_SLOW_WEIGHT = 6.0
# What is believed of a draft nobody has tried: a try costs little, never trying may cost a lot.
_UNTRIED = 0.8
_BELIEF_WEIGHT = 8.0
# A new measurement's share in the time of its depth, and in those of the others in its class: what slows one
# down, a neighbour of the machine or a longer context, mostly slows them all.
_TIME_SHARE, _COMMON_SHARE = 0.1, 0.05
# The most by which one round may seem slower than its depth.
_MOST_RISE = 1.3
# Rounds before a depth's own time is believed; until then it is taken to be a little faster than it is
# estimated to be, so that it is tried where that could pay. Rounds count less and less while the depth does
# not run: what was measured beside a busy neighbour is measured again one day.
_TRIES, _HOPE = 3, 0.93
_BELIEVED, _MOST_COUNT, _COUNT_FADE = 2.5, 20.0, 0.985
# The weight, in rounds, of a straight line through the times of all depths beside a depth's own; that of the
# slope such lines have had, in rounds times the square of a distance in depth.
_LINE_WEIGHT, _SLOPE_WEIGHT = 3.0, 20.0
# What one more draft adds to a round, as a part of one without drafts, before anything is measured.
_USUAL_SLOPE = 0.12
# Another depth is taken only if it promises this much more: two that are as good would alternate.
_MARGIN = 1.01
# What was recorded is taken in, and the depths are compared, once in so many rounds, for the host's sake;
# while a depth's time is not believed yet, more often.
_HELD_ROUNDS, _TRIED_ROUNDS = 6, 2
# A probe is two rounds, since the first has no drafts to verify; the interval between two doubles.
_PROBE_ROUNDS = 2
_FIRST_PROBE, _LAST_PROBE = 16, 1024
_MOST_PROBES = 0.01


class _Rate:
    """A share of successes, of late and of all times; both weights are in observations."""

    __slots__ = ("kept_fast", "kept_slow", "seen_fast", "seen_slow")

    def __init__(self) -> None:
        self.kept_fast = self.seen_fast = self.kept_slow = self.seen_slow = 0.0

    def add(self, kept: int, seen: int) -> None:
        fast, slow = 0.5 ** (seen / _FAST_ROUNDS), 0.5 ** (seen / _SLOW_ROUNDS)
        self.kept_fast = self.kept_fast * fast + kept
        self.seen_fast = self.seen_fast * fast + seen
        self.kept_slow = self.kept_slow * slow + kept
        self.seen_slow = self.seen_slow * slow + seen

    def age(self, rounds: int) -> None:
        """Let rounds pass that tried nothing: what was seen of late is less and less of late."""
        fade = 0.5 ** (rounds / _FAST_ROUNDS)
        self.kept_fast *= fade
        self.seen_fast *= fade

    def value(self, believed: float) -> float:
        """The share now; `believed` is that of an untried one, and counts as several observations."""
        long_run = (self.kept_slow + _BELIEF_WEIGHT * believed) / (self.seen_slow + _BELIEF_WEIGHT)
        return (self.kept_fast + _SLOW_WEIGHT * long_run) / (self.seen_fast + _SLOW_WEIGHT)


class _Time:
    """Seconds of a round, and what weight in rounds they have; how many of the first few rounds were timed,
    and the sum of those that are not yet taken in."""

    __slots__ = ("count", "new_count", "new_s", "seconds", "tries")

    def __init__(self, seconds: float, count: float = 1.0) -> None:
        self.seconds, self.count = seconds, count
        self.tries = min(round(count), _TRIES)
        self.new_s, self.new_count = 0.0, 0


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


def _line(times: Mapping[int, _Time], usual: float) -> tuple[float, float]:
    """Seconds at depth 0 and of one more draft, by the straight line nearest to the times, by their weights.

    usual: what a draft adds to a round without drafts, as a part of it, where the times say little of that.
    """
    weight = sum_x = sum_y = sum_xx = sum_xy = 0.0
    for depth, known in times.items():
        count, seconds = known.count, known.seconds
        weight += count
        sum_x += count * depth
        sum_y += count * seconds
        sum_xx += count * depth * depth
        sum_xy += count * depth * seconds
    x, y = sum_x / weight, sum_y / weight
    slope = sum_xy - x * sum_y + _SLOPE_WEIGHT * usual * y / (1 + usual * x)
    # Never so steep that a round without drafts would take no time.
    slope = min(max(slope / (sum_xx - x * sum_x + _SLOPE_WEIGHT), 0.0), y / (1 + x))
    return y - slope * x, slope


class DepthController:
    """Chooses one depth a round for the whole batch, from `depths` that are ready to run.

    times_s maps (depth, bucket) to the seconds of a round where they are known beforehand; what is missing is
    estimated from its neighbours, tried where it could pay, and measured. Raises ValueError for no depth or a
    negative one.
    """

    def __init__(
        self, depths: Iterable[int], times_s: Mapping[tuple[int, Hashable], float] | None = None
    ) -> None:
        self.depths = tuple(sorted(set(depths)))
        if not self.depths or self.depths[0] < 0:
            raise ValueError(f"depths must be numbers from 0 on, at least one, got {self.depths}; name some")
        self._rates = [_Rate() for _ in range(self.depths[-1])]
        self._times: dict[_Class, dict[int, _Time]] = {}
        for (depth, bucket), seconds in (times_s or {}).items():
            self._times.setdefault((bucket, 0), {})[depth] = _Time(seconds, _MOST_COUNT)
        # Those with times that are not yet taken in.
        self._timed: dict[_Class, dict[int, _Time]] = {}
        self._usual_slope = _USUAL_SLOPE
        # The tokens of rounds that are not yet taken in, by their number of drafts.
        self._rounds_of: dict[int, list[Sequence[Sequence[int]]]] = {}
        self._held = 0
        self._place: _Class | None = None
        self.depth = first_depth(self.depths)
        self.reason: Reason = "best"
        self._rounds = self._since_draft = self._probe_left = 0
        self._probe_after = _FIRST_PROBE
        self.num_probes = 0
        self.num_switches = 0

    def add_depth(self, depth: int) -> None:
        """Take one more depth, whose programs have become ready."""
        self.depths = tuple(sorted({*self.depths, depth}))
        self._rates += [_Rate() for _ in range(depth - len(self._rates))]
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
        times = self._timed.get(place)
        if times is None:
            times = self._timed[place] = self._times.setdefault(place, {})
        known = times.get(depth)
        if known is None:
            times[depth] = _Time(seconds)
        elif known.tries < _TRIES:
            # The first may make something ready, and a neighbour of the machine may hold up any: a depth that
            # looks slow for it would not be tried again for long.
            known.seconds = min(known.seconds, seconds)
            known.tries, known.count = known.tries + 1, known.count + 1
        else:
            # How long one was held up says nothing about the depth.
            known.new_s += min(seconds, _MOST_RISE * known.seconds)
            known.new_count += 1

    def choose(self, bucket: Hashable, context: int) -> int:
        """The depth of the next round, for a batch in `bucket` whose contexts are of that class."""
        self._rounds += 1
        place = (bucket, context)
        if self._held and place == self._place:
            self._held -= 1
        else:
            self._place = place
            self._learn()
            self._compare(place)
            known = self._times.get(place, {}).get(self.depth)
            is_known = known is not None and known.count >= _BELIEVED
            self._held = (_HELD_ROUNDS if is_known else _TRIED_ROUNDS) - 1
        return self._probe() if not self.depth and self.reason != "only" else self.depth

    def _learn(self) -> None:
        """Take in what was recorded."""
        for num_drafts, rounds in self._rounds_of.items():
            if not rounds:
                continue
            lengths, late = bytearray(), _MOST_SEEN // (len(rounds[-1]) or 1) or 1
            for token_ids in rounds[-late:]:
                lengths.extend(map(len, token_ids))
            seen = len(lengths) - lengths.count(0)
            for rate in self._rates[num_drafts:]:
                rate.age(len(rounds))
            rounds.clear()
            # More tokens than that: what stood where a draft was missing was right.
            for index in range(num_drafts if seen else 0):
                kept = seen - lengths.count(index + 1)
                self._rates[index].add(kept, seen)
                seen = kept
                if not seen:
                    break
        if self._place is not None and self._place in self._times:
            self._timed[self._place] = self._times[self._place]
        for place, times in self._timed.items():
            for known in times.values():
                count = known.new_count
                if count:
                    change = known.new_s / (count * known.seconds) - 1
                    common = 1 + (1 - (1 - _COMMON_SHARE) ** count) * change
                    own = 1 + (1 - (1 - _TIME_SHARE) ** count) * change
                    for other in times.values():
                        other.seconds *= own if other is known else common
                    known.count = min(known.count + count, _MOST_COUNT)
                    known.new_s, known.new_count = 0.0, 0
                elif place == self._place:
                    known.count *= _COUNT_FADE
        self._timed.clear()

    def _compare(self, place: _Class) -> None:
        """Go over to the depth that promises most."""
        if len(self.depths) == 1:
            self.depth, self.reason = self.depths[0], "only"
            return
        self.reason = "best"
        speeds = self.speeds(*place)
        best = self.depth
        most = speeds[best] * _MARGIN
        for depth, speed in speeds.items():
            if speed > most:
                best, most = depth, speed
        if best != self.depth:
            self.depth = best
            self.num_switches += 1
        if best:
            self._since_draft, self._probe_after, self._probe_left = 0, _FIRST_PROBE, 0

    def speeds(self, bucket: Hashable, context: int) -> dict[int, float]:
        """Of each depth the tokens a second that one request is expected to gain in a bucket and class of
        contexts; 0 while no time is known."""
        place = (bucket, context)
        times = self._times.get(place) or self._nearest(place)
        if not times:
            return dict.fromkeys(self.depths, 0.0)
        rates, (base, slope) = self._rates, _line(times, self._usual_slope)
        if len(times) > 1 and base > 0:
            self._usual_slope = slope / base
        speeds, total, reached, believed, drafts = {}, 1.0, 1.0, _UNTRIED, 0
        for depth in self.depths:
            while drafts < depth:
                believed = rates[drafts].value(believed)
                reached *= believed
                total += reached
                drafts += 1
            seconds, count, known = base + slope * depth, 0.0, times.get(depth)
            if known is not None:
                count = known.count
                seconds = (count * known.seconds + _LINE_WEIGHT * seconds) / (count + _LINE_WEIGHT)
            speeds[depth] = total / (seconds if count >= _BELIEVED else _HOPE * seconds)
        return speeds

    def _nearest(self, place: _Class) -> Mapping[int, _Time]:
        """The times of the class that is most like one where nothing was timed: of the same bucket if there
        is one, at the least distance in context."""
        if not self._times:
            return {}
        bucket, context = place
        nearest = min(self._times, key=lambda one: (one[0] != bucket, abs(one[1] - context)))
        return self._times[nearest]

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
