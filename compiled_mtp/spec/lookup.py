"""Decides whether a round with looked-up drafts verifies all of them or only as many as a chain has. Pure
Python.

A wide round verifies every draft from the text, a narrow one only the first ones. A wide round pays if it
takes less time than the narrow rounds that would have given the same tokens. No token depends on it.
"""

from __future__ import annotations

from collections.abc import Hashable

# The weight of a new time, and the largest rise that counts of it: other load only ever slows a round down.
_TIME_SHARE, _MOST_RISE = 0.2, 1.3
# The weight of a wide round in the mean number of narrow rounds that one is worth.
_WORTH_SHARE = 0.1
# Where wide rounds do not pay, two of them are tried again after this many chances, which double each time.
_FIRST_TRY, _LAST_TRY, _TRY_ROUNDS = 32, 1024, 2


class WideRounds:
    """What wide rounds of `width` drafts take and give, by the depth of the rounds and the class of their
    times.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._seconds: dict[tuple[Hashable, int, bool], float] = {}
        # The narrow rounds that a wide one replaces, by depth.
        self._worth: dict[int, float] = {}
        self._chances, self._try_after, self._tries_left = 0, _FIRST_TRY, 0

    def pays(self, depth: int, round_class: Hashable) -> bool:
        """Return whether the next round of `depth`, which has looked-up drafts, should be wide."""
        wide, narrow = (self._seconds.get((round_class, depth, is_wide)) for is_wide in (True, False))
        if wide is None or narrow is None or self._worth_at(depth) * narrow > wide:
            self._chances, self._try_after, self._tries_left = 0, _FIRST_TRY, 0
            return True
        if self._tries_left:
            self._tries_left -= 1
            return True
        self._chances += 1
        if self._chances >= self._try_after:
            self._chances, self._try_after = 0, min(2 * self._try_after, _LAST_TRY)
            self._tries_left = _TRY_ROUNDS - 1
            return True
        return False

    def record_round(self, depth: int, verify: int, kept: int, *, is_looked_up: bool) -> None:
        """Record a round that verified `verify` drafts of one request and kept `kept` of them."""
        if verify > depth:
            replaced = kept // (depth + 1) + 1 if is_looked_up else 1
            worth = self._worth_at(depth)
            self._worth[depth] = worth + _WORTH_SHARE * (replaced - worth)

    def record_time(self, depth: int, round_class: Hashable, seconds: float, *, is_wide: bool) -> None:
        """Record the time of a round during which no other launch ran."""
        key = (round_class, depth, is_wide)
        known = self._seconds.get(key, seconds)
        self._seconds[key] = known + _TIME_SHARE * (min(seconds, _MOST_RISE * known) - known)

    def _worth_at(self, depth: int) -> float:
        """The narrow rounds that a wide one replaces: at first as if every draft were right."""
        return self._worth.get(depth, self._width // (depth + 1) + 1)
