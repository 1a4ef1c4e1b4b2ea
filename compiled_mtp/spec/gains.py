"""How many tokens a round of each depth would give, learnt from rounds of the depths that were run.

Two ways are put together. One counts how often each draft is kept, by its number; where drafts fail then
depends on where rounds begin, and so on the depth that was run. The other replays the text: a token that was
drafted rightly would have been from another beginning too, one at which a draft failed would have failed, so
that the rounds that any depth would have had can be counted. No token depends on it. Pure Python.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

# A round's weight halves after so many rounds of one request: long enough for a steady text, short enough to
# follow one that changes every few hundred tokens. With more requests, that of a round
# of one halves after as many more of these as the square root of their number: the mean is to be steadier.
_FAST_ROUNDS = 24.0
_SLOW_ROUNDS = 1000.0
# Of what is taken in at once, requests times rounds, the latest that count: what is older hardly would.
_MOST_SEEN = 96
# The weight, in rounds, of what has been seen so far beside what was seen lately.
_SLOW_WEIGHT = 6.0
# What is believed of a draft nobody has tried: a try costs little, never trying may cost a lot.
_UNTRIED = 0.8
_BELIEF_WEIGHT = 8.0
# Requests whose texts are replayed, the first ones of a batch, and as above how many of their rounds at once:
# for the host's sake. What was replayed halves after so many of their rounds, counted as above: rounds that
# fall in step with a text are to be seen several times. The weight, in rounds, of what is foretold by the
# drafts' numbers beside it.
_REPLAYED, _MOST_REPLAYED, _REPLAYED_ROUNDS = 4, 32, 48.0
_FORETOLD_WEIGHT = 24.0
# Of each depth's rounds in a sum over several.
_SUM_BITS = 16


class _Rate:
    """A share of successes, of late and of all times; both weights are in observations."""

    __slots__ = ("kept_fast", "kept_slow", "seen_fast", "seen_slow")

    def __init__(self) -> None:
        self.kept_fast = self.seen_fast = self.kept_slow = self.seen_slow = 0.0

    def add(self, kept: int, seen: int, fast_rounds: float) -> None:
        """Count so many successes of so many; fast_rounds: the observations by which the late ones halve."""
        fast, slow = 0.5 ** (seen / fast_rounds), 0.5 ** (seen / _SLOW_ROUNDS)
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


class _Replay:
    """How many rounds each depth but 0 would have had for the texts of the first few requests.

    widths: a round's most tokens, by depth. Of a request there is known how many drafts its open round of
    each depth has kept, all in one number, the digit of `widths[i]` at i. tokens, rounds: of late.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        self._widths = widths
        self._states = [0] * _REPLAYED
        # By state, tokens of a round and whether the last of them is hard: the next state, and the rounds
        # that end meanwhile, _SUM_BITS for each depth.
        self._steps: dict[int, tuple[int, int]] = {}
        # By how much fewer of the tokens behind whole rounds were taken to be hard than are believed to be.
        self._owed = 0.0
        self.tokens, self.rounds = 0.0, [0.0] * len(widths)

    def age(self, rounds: int, requests: int) -> None:
        """Let rounds pass."""
        fade = 0.5 ** (rounds * math.sqrt(min(requests, _REPLAYED) or 1) / _REPLAYED_ROUNDS)
        self.tokens *= fade
        self.rounds = [count * fade for count in self.rounds]

    def add(self, num_drafts: int, rounds: Sequence[Sequence[Sequence[int]]], hard: float) -> None:
        """Count rounds of `num_drafts`, at least 1; hard: the share of the tokens behind rounds whose drafts
        were all kept at which a draft would fail, for what nobody drafted nobody knows."""
        steps, states, owed = self._steps, self._states, self._owed
        tokens = ended = 0
        requests = min(_REPLAYED, min(map(len, rounds)))
        rounds = rounds[-(_MOST_REPLAYED // (requests or 1)) :]
        for row in range(requests):
            state = states[row]
            for token_ids in rounds:
                length = len(token_ids[row])
                key = state << 5 | length << 1
                if length <= num_drafts:
                    if not length:
                        continue
                    key |= 1
                else:
                    owed += hard
                    if owed >= 1.0:
                        owed -= 1.0
                        key |= 1
                step = steps.get(key)
                if step is None:
                    step = steps[key] = self._step(state, length, key & 1)
                state = step[0]
                ended += step[1]
                tokens += length
            states[row] = state
        self._owed = owed
        self.tokens += tokens
        mask = (1 << _SUM_BITS) - 1
        self.rounds = [count + (ended >> _SUM_BITS * i & mask) for i, count in enumerate(self.rounds)]

    def _step(self, state: int, length: int, hard: int) -> tuple[int, int]:
        """Of every depth: tokens that are drafted rightly fill rounds, and a hard one ends one."""
        after, ended, place = 0, 0, 1
        for index, width in enumerate(self._widths):
            state, kept = divmod(state, width)
            whole, kept = divmod(kept + length - hard, width)
            after += 0 if hard else kept * place
            ended |= whole + hard << _SUM_BITS * index
            place *= width
        return after, ended


class Gains:
    """What drafts give at each of the `depths`, ascending: learnt from rounds, foretold for all."""

    def __init__(self, depths: Sequence[int]) -> None:
        self._rates: list[_Rate] = []
        self.use(depths)

    def use(self, depths: Sequence[int]) -> None:
        """Foretell these depths from now on."""
        self._depths = depths
        self._rates += [_Rate() for _ in range(depths[-1] - len(self._rates))]
        self._replay = _Replay([depth + 1 for depth in depths if depth])

    def learn(self, num_drafts: int, rounds: Sequence[Sequence[Sequence[int]]]) -> None:
        """Take in rounds, at least one, that verified `num_drafts` drafts of each request: their tokens."""
        requests = len(rounds[-1])
        late = rounds[-(_MOST_SEEN // (requests or 1) or 1) :]
        lengths = bytes([len(new) for token_ids in late for new in token_ids])
        fast_rounds = _FAST_ROUNDS * math.sqrt(requests or 1)
        seen = len(lengths) - lengths.count(0)
        for rate in self._rates[num_drafts:]:
            rate.age(len(rounds))
        self._replay.age(len(rounds), requests)
        if not num_drafts:
            return
        # More tokens than that: what stood where a draft was missing was right.
        for index in range(num_drafts if seen else 0):
            kept = seen - lengths.count(index + 1)
            self._rates[index].add(kept, seen, fast_rounds)
            seen = kept
            if not seen:
                break
        believed = _UNTRIED
        for rate in self._rates[: num_drafts + 1]:
            believed = rate.value(believed)
        self._replay.add(num_drafts, rounds, 1 - believed)

    def tokens(self) -> list[float]:
        """Of each depth the tokens that a round is expected to give one request."""
        replay, found = self._replay, []
        ended = iter(replay.rounds)
        total, reached, believed, drafts = 1.0, 1.0, _UNTRIED, 0
        for depth in self._depths:
            while drafts < depth:
                believed = self._rates[drafts].value(believed)
                reached *= believed
                total += reached
                drafts += 1
            if depth:
                seen = replay.tokens + _FORETOLD_WEIGHT * total
                found.append(seen / (next(ended) + _FORETOLD_WEIGHT))
            else:
                found.append(1.0)
        return found
