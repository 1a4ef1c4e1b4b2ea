"""How many tokens to draft in the next round: the depth that is expected to give the most tokens a second.

A depth costs time (a wider verify, more draft passes) and pays by the drafts that are kept. Both are learnt
while the engine runs: a round's time by (depth, bucket, context class), and how often each draft is kept,
given that the ones before it were. No token depends on it, whatever it chooses. Pure Python.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

# A round's weight halves after so many rounds of one request: long enough for a steady text, short enough to
# follow one that changes every few hundred tokens.
_FAST_ROUNDS = 24.0
_SLOW_ROUNDS = 1000.0
# The weight, in rounds, of what has been seen so far beside what was seen lately.
_SLOW_WEIGHT = 6.0
# What is believed of a draft nobody has tried: a try costs little, never trying may cost a lot.
_UNTRIED = 0.8
_BELIEF_WEIGHT = 8.0
# A new measurement's share in the time of its class.
_TIME_SHARE = 0.1
# Another depth is taken only if it promises this much more: two that are as good would alternate.
_MARGIN = 1.01
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

    def age(self) -> None:
        """Let a round pass that tried nothing: what was seen of late is less and less of late."""
        fade = 0.5 ** (1 / _FAST_ROUNDS)
        self.kept_fast *= fade
        self.seen_fast *= fade

    def value(self, believed: float) -> float:
        """The share now; `believed` is that of an untried one, and counts as several observations."""
        long_run = (self.kept_slow + _BELIEF_WEIGHT * believed) / (self.seen_slow + _BELIEF_WEIGHT)
        return (self.kept_fast + _SLOW_WEIGHT * long_run) / (self.seen_fast + _SLOW_WEIGHT)


def context_class(tokens: int) -> int:
    """The class of a context's length: 0 up to 4,096 tokens, one more for each doubling."""
    return max(0, (tokens - 1) // 4096).bit_length()


class DepthController:
    """Chooses one depth a round for the whole batch, from `depths` that are ready to run.

    times_s maps (depth, bucket) to the seconds of a round, as measured while the engine warmed up; what it
    lacks is estimated from its neighbours. Raises ValueError for no depth or a negative one.
    """

    def __init__(self, depths: Iterable[int], times_s: Mapping[tuple[int, int], float]) -> None:
        self.depths = tuple(sorted(set(depths)))
        if not self.depths or self.depths[0] < 0:
            raise ValueError(f"depths must be numbers from 0 on, at least one, got {self.depths}; name some")
        self._rates = [_Rate() for _ in range(self.depths[-1])]
        self._times_s: dict[tuple[int, int, int], float] = {
            (depth, bucket, 0): seconds for (depth, bucket), seconds in times_s.items()
        }
        self._depth = self.depths[-1] if len(self.depths) == 1 else self._first()
        self._rounds = self._probes = self._since_draft = 0
        self._probe_after = _FIRST_PROBE
        self.rounds_by_depth = dict.fromkeys(self.depths, 0)
        self.num_switches = 0

    def _first(self) -> int:
        """The depth of the first round: the middle of those that draft."""
        drafting = [depth for depth in self.depths if depth]
        return drafting[len(drafting) // 2]

    @property
    def num_probes(self) -> int:
        """Rounds at depth 0 that drafted all the same, to see whether it would pay."""
        return self._probes

    def add_depth(self, depth: int) -> None:
        """Take one more depth, whose programs have become ready."""
        self.depths = tuple(sorted({*self.depths, depth}))
        self._rates += [_Rate() for _ in range(depth - len(self._rates))]
        self.rounds_by_depth.setdefault(depth, 0)

    def record_round(self, verify_step: int, num_accepted: Sequence[int]) -> None:
        """Count a round that verified `verify_step` drafts of each request and kept num_accepted of them."""
        for rate in self._rates[verify_step:]:
            rate.age()
        for index in range(verify_step):
            seen = sum(accepted >= index for accepted in num_accepted)
            if not seen:
                return
            self._rates[index].add(sum(accepted > index for accepted in num_accepted), seen)

    def record_time(self, depth: int, bucket: int, context_tokens: int, seconds: float) -> None:
        """Take the time of a round that verified and drafted at `depth`, with no other launch beside it."""
        key = (depth, bucket, context_class(context_tokens))
        known = self._times_s.get(key)
        if known is None:
            self._times_s[key] = seconds
            return
        # One that a neighbour of the machine held up says nothing about the depth.
        self._times_s[key] = known + _TIME_SHARE * (min(seconds, 2 * known) - known)

    def choose(self, bucket: int, context_tokens: int) -> int:
        """The depth of the drafts to make in the next round, for a batch in `bucket`."""
        self._rounds += 1
        best, speed = self._depth, self.speed(self._depth, bucket, context_tokens) * _MARGIN
        for depth in self.depths:
            if (promised := self.speed(depth, bucket, context_tokens)) > speed:
                best, speed = depth, promised
        if best != self._depth:
            self._depth = best
            self.num_switches += 1
        chosen = self._probe() if best == 0 else best
        if best:
            self._since_draft, self._probe_after = 0, _FIRST_PROBE
        self.rounds_by_depth[chosen] += 1
        return chosen

    def speed(self, depth: int, bucket: int, context_tokens: int) -> float:
        """Expected tokens a second of one request at that depth; 0 where nothing is known of its time."""
        seconds = self._time_s(depth, bucket, context_class(context_tokens))
        return self.expected_tokens(depth) / seconds if seconds else 0.0

    def expected_tokens(self, depth: int) -> float:
        """Tokens a round is expected to give a request at that depth, 1 to depth + 1."""
        total = reached = 1.0
        believed = _UNTRIED
        for rate in self._rates[:depth]:
            believed = rate.value(believed)
            reached *= believed
            total += reached
        return total

    def _time_s(self, depth: int, bucket: int, context: int) -> float:
        """A round's time: measured, or that of the nearest context scaled as other depths are."""
        known = self._times_s.get((depth, bucket, context))
        if known is not None:
            return known
        nearest = [
            (abs(other - context), seconds, other)
            for (d, b, other), seconds in self._times_s.items()
            if (d, b) == (depth, bucket)
        ]
        if not nearest:
            return 0.0
        _, seconds, other = min(nearest)
        ratios = [
            here / there
            for d in self.depths
            if (here := self._times_s.get((d, bucket, context))) is not None
            and (there := self._times_s.get((d, bucket, other)))
        ]
        return seconds * math.prod(ratios) ** (1 / len(ratios)) if ratios else seconds

    def _probe(self) -> int:
        """0, or now and then the shallowest depth that drafts: at depth 0 nothing else tells what drafts are
        worth. The interval doubles, and no more than one round in a hundred is spent."""
        self._since_draft += 1
        is_due = self._since_draft >= self._probe_after and self._probes < _MOST_PROBES * self._rounds
        drafting = [depth for depth in self.depths if depth]
        if not is_due or not drafting:
            return 0
        self._probes += 1
        self._since_draft = 0
        self._probe_after = min(2 * self._probe_after, _LAST_PROBE)
        return drafting[0]
