"""How many tokens to draft in the next round: the depth that is expected to give the most tokens a second.

A depth costs time (a wider verify, more draft passes) and pays by the drafts that are kept. Both are learnt
while the engine runs: a round's time by (depth, bucket, context class), and how often each draft is kept,
given that the ones before it were. No token depends on it, whatever it chooses. Pure Python.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Literal, TypeAlias

Reason: TypeAlias = Literal["best", "probe", "only"]
"""Why a round has its depth: it promises most, it is to show what drafts are worth, no other is ready."""

# A round's weight halves after so many rounds of one request: long enough for a steady text, short enough to
# follow one that changes every few hundred tokens.
_FAST_ROUNDS = 24.0
_SLOW_ROUNDS = 1000.0
# The weight, in rounds, of what has been seen so far beside what was seen lately.
_SLOW_WEIGHT = 6.0
# What is believed of a draft nobody has tried: a try costs little, never trying may cost a lot.
_UNTRIED = 0.8
_BELIEF_WEIGHT = 8.0
# A new measurement's share in the time of its depth, and in those of the others in its class: what slows one
# down, a neighbour of the machine or a longer context, mostly slows them all.
_TIME_SHARE, _COMMON_SHARE = 0.1, 0.03
# Rounds before a depth's own time is believed; until then it is taken to be a little faster than it is
# estimated to be, so that it is tried where that could pay.
_TRIES, _HOPE = 3, 0.93
# What one more draft adds to a round's time, of a round without drafts, where nothing has been measured.
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
    """Seconds of a round, and of how many rounds; beside them the sum of rounds that are not yet taken in."""

    __slots__ = ("count", "new_count", "new_s", "seconds")

    def __init__(self, seconds: float, count: int) -> None:
        self.seconds, self.count = seconds, count
        self.new_s, self.new_count = 0.0, 0


_Class: TypeAlias = tuple[Hashable, int]
"""Rounds whose times compare: bucket, and class of the contexts' length."""


def context_class(tokens: int) -> int:
    """The class of a context's length: 0 up to 4,096 tokens, one more for each doubling."""
    return max(0, (tokens - 1) // 4096).bit_length()


def first_depth(depths: Iterable[int]) -> int:
    """The depth to begin with: the middle one of those that draft."""
    ordered = sorted(depths)
    drafting = [depth for depth in ordered if depth] or ordered
    return drafting[len(drafting) // 2]


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
            self._times.setdefault((bucket, 0), {})[depth] = _Time(seconds, _TRIES)
        # Until another depth has been timed.
        self._likenesses: dict[tuple[int, _Class], tuple[_Time | None, float]] = {}
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
        times = self._times.get((bucket, context))
        if times is None:
            times = self._times[bucket, context] = {}
        known = times.get(depth)
        if known is None:
            times[depth] = _Time(seconds, 1)
            self._likenesses.clear()
        elif known.count < _TRIES:
            # The first may make something ready, and any may be held up by a neighbour of the machine.
            known.seconds, known.count = min(known.seconds, seconds), known.count + 1
        else:
            # One that was held up says nothing about the depth.
            known.new_s += min(seconds, 2 * known.seconds)
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
            is_known = known is not None and known.count >= _TRIES
            self._held = (_HELD_ROUNDS if is_known else _TRIED_ROUNDS) - 1
        return self._probe() if not self.depth and self.reason != "only" else self.depth

    def _learn(self) -> None:
        """Take in what was recorded."""
        for num_drafts, rounds in self._rounds_of.items():
            counts = Counter(len(new) for token_ids in rounds for new in token_ids if new)
            seen = counts.total()
            for rate in self._rates[num_drafts:]:
                rate.age(len(rounds))
            # More tokens than that: what stood where a draft was missing was right.
            for index in range(num_drafts):
                ended = counts[index + 1]
                if seen:
                    self._rates[index].add(seen - ended, seen)
                seen -= ended
        self._rounds_of.clear()
        for times in self._times.values():
            for known in times.values():
                if known.new_count:
                    change = known.new_s / known.new_count / known.seconds - 1
                    for other in times.values():
                        share = _TIME_SHARE if other is known else _COMMON_SHARE
                        other.seconds *= 1 + (1 - (1 - share) ** known.new_count) * change
                    known.new_s, known.new_count = 0.0, 0

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
        times = self._times.get(place, {})
        speeds, total, reached, believed, drafts = {}, 1.0, 1.0, _UNTRIED, 0
        rates = self._rates
        for depth in self.depths:
            while drafts < depth:
                believed = rates[drafts].value(believed)
                reached *= believed
                total += reached
                drafts += 1
            known = times.get(depth)
            if known is not None and known.count >= _TRIES:
                speeds[depth] = total / known.seconds
            else:
                seconds = self._estimate(depth, place)
                speeds[depth] = total / seconds if seconds else 0.0
        return speeds

    def _estimate(self, depth: int, place: _Class) -> float:
        """A round's time at a depth that is not known well enough: 0 for nothing to tell it from."""
        key = (depth, place)
        if key not in self._likenesses:
            self._likenesses[key] = self._liken(depth, place)
        known, ratio = self._likenesses[key]
        return 0.0 if known is None else known.seconds * ratio

    def _liken(self, depth: int, place: _Class) -> tuple[_Time | None, float]:
        """The known time that a depth's goes with, and how much of it it is likely to be."""
        own = self._times.get(place, {})
        others = [self._times[one] for one in self._nearest(place)]
        if not own:
            # Nothing was ever timed there: as elsewhere, where everything is slower or faster alike.
            return next((times[depth] for times in others if depth in times), None), 1.0
        measured = sorted((known for known in own if known != depth), key=lambda known: abs(known - depth))
        if not measured:
            return own[depth], 1.0
        anchor, scale = measured[0], own[measured[0]].seconds
        for times in others:
            if anchor in times and depth in times:
                return own[anchor], _HOPE * times[depth].seconds / times[anchor].seconds
        if len(measured) > 1:
            slope = (own[measured[1]].seconds / scale - 1) / (measured[1] - anchor)
            return own[anchor], _HOPE * max(1 + slope * (depth - anchor), 0.5)
        return own[anchor], _HOPE * (1 + _USUAL_SLOPE * depth) / (1 + _USUAL_SLOPE * anchor)

    def _nearest(self, place: _Class) -> list[_Class]:
        """The other classes that were timed, those of the same bucket first, by the distance in context."""
        bucket, context = place
        others = [one for one in self._times if one != place]
        return sorted(others, key=lambda one: (one[0] != bucket, abs(one[1] - context)))

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
