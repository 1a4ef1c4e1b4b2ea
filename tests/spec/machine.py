"""A depth policy with a simulated machine and texts: rounds without a device. No torch."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from compiled_mtp.graphs.buckets import RoundShape
from compiled_mtp.plan import StepPlan, StepResult
from compiled_mtp.spec.policy import DepthPolicy

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
DEPTHS = (0, 1, 2, 3, 5)


def _round_ms(
    none_ms: Mapping[int, float], three_ms: Mapping[int, float], draft_ms: float
) -> dict[int, list[float]]:
    """Milliseconds of a round by size and depth (0 to 5), from those at depths 0 and 3 at three sizes.

    A draft takes its own time and adds a row to verify; a row takes longer the more rows there are."""
    found, known = {}, sorted(none_ms)
    for size in [size for size in SIZES if size <= known[-1]]:
        at = max(bisect_left(known, size), 1)
        low, high = known[at - 1], known[at]
        share = (size - low) / (high - low)
        none, three = (ms[low] + share * (ms[high] - ms[low]) for ms in (none_ms, three_ms))
        rows = three - none - 3 * draft_ms
        found[size] = [none + d * draft_ms + rows * (0.8 * d / 3 + 0.2 * (d / 3) ** 2) for d in range(6)]
    return found


MACHINES = {
    "4b": _round_ms({1: 2.56, 8: 2.8, 32: 3.4}, {1: 3.76, 8: 4.7, 32: 7.5}, 0.3),
    "27b": _round_ms({1: 12.97, 8: 14.1, 32: 17.6}, {1: 15.6, 8: 17.7, 32: 28.0}, 0.8),
}
"""Round times on an H200; linear between the measured sizes."""

MANY = {
    "27b": {
        64: [20.6, 21.6, 23.2, 29.1, 35.0, 40.9],
        128: [26.6, 34.7, 46.5, 58.2, 70.0, 81.7],
        256: [45.9, 69.4, 92.9, 116.4, 140.0, 163.5],
    },
    "27b fp8": {
        64: [13.7, 14.6, 15.8, 19.2, 22.6, 25.9],
        128: [19.7, 24.8, 31.6, 38.4, 45.1, 51.9],
        256: [36.2, 49.7, 63.2, 76.8, 90.3, 103.8],
    },
    "35b-a3b": {
        64: [19.4, 22.2, 23.2, 24.0, 24.7, 25.5],
        128: [23.9, 25.0, 25.8, 26.6, 27.4, 28.2],
        256: [29.2, 30.0, 30.8, 31.7, 32.5, 33.4],
    },
}
"""1.3 times the roofs of rounds of many requests at depths 0 to 5 (`compiled-mtp bench step`)."""
for _ms in MANY.values():
    # Only the rounds between the first prompts are smaller.
    _ms.update(dict.fromkeys((size for size in SIZES if size < 64), _ms[64]))


def rate_for(mean_new_tokens: float) -> float:
    """Return the acceptance rate at which a round of depth 3 gives this many tokens."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if _expected(middle, 3) < mean_new_tokens else (low, middle)
    return low


def _expected(rate: float, drafts: int) -> float:
    return sum(rate**k for k in range(drafts + 1))


@dataclass(frozen=True)
class World:
    """What the policy must learn.

    ms: the time of a round, by size and then depth. rate(round, request): how often its drafts are kept,
    given that those before them were. noise: the standard deviation of a round's time, as a fraction of it.
    hiccups: the fraction of rounds that take three times as long. cold_ms: the extra time of the first round
    of a size and depth. tokens: the mean length of a request, which another follows at once; None: requests
    do not end. chunk_ms, prompt_ms: how long a prompt occupies the host and the device. pauses: the fraction
    of results that the host reads late_ms late.
    """

    ms: Mapping[int, Sequence[float]]
    rate: Callable[[int, int], float]
    batch: int
    noise: float = 0.01
    hiccups: float = 0.02
    cold_ms: float = 30.0
    tokens: int | None = None
    chunk_ms: float = 8.0
    prompt_ms: float = 0.0
    pauses: float = 0.0
    late_ms: float = 8.0


class Machine:
    """Plans as the scheduler makes them, with one launch in flight, and a clock that only they move."""

    def __init__(self, world: World, seed: int) -> None:
        self.world, self.chance = world, random.Random(seed)
        self.now_s = self._free_s = 0.0
        self.policy = DepthPolicy(DEPTHS, SIZES, clock=lambda: self.now_s)
        self.waiting, self.requests = world.batch, list[int]()
        self.num_rounds = 0
        # The depths of the rounds that count, and the time of auto and of fixed depths for the same tokens.
        self.depths: list[int] = []
        self.auto_ms, self.fixed_ms = 0.0, dict.fromkeys(DEPTHS, 0.0)
        self._chain, self._next, self._step_id = 3, 0, 0
        self._ready: set[tuple[int, int]] = set()
        self._flight: list[tuple[StepPlan, float, list[list[int]]]] = []

    def run(self, warm: int, rounds: int) -> float:
        """Return tokens per second relative to the best fixed depth, over `rounds` rounds after `warm`
        others.
        """
        while self.num_rounds < warm + rounds:
            if self.waiting and (not self._flight or self._flight[-1][0].kind == "decode"):
                self._prompt()
            else:
                self._round(counts=self.num_rounds >= warm)
            while len(self._flight) > 1:
                plan, done_s, token_ids = self._flight.pop(0)
                if self.world.pauses and self.chance.random() < self.world.pauses:
                    self.now_s = max(self.now_s, done_s) + self.world.late_ms / 1e3
                is_late = done_s <= self.now_s
                self.now_s = max(self.now_s, done_s)
                self.policy.read(StepResult(plan, token_ids=token_ids, is_late=is_late))
        return min(self.fixed_ms.values()) / self.auto_ms

    def _launch(self, plan: StepPlan, host_ms: float, device_ms: float, token_ids: list[list[int]]) -> None:
        self.policy.launch(plan)
        self.now_s += host_ms / 1e3
        self._free_s = max(self._free_s, self.now_s) + device_ms / 1e3
        self._flight.append((plan, self._free_s, token_ids))
        self._step_id += 1

    def _prompt(self) -> None:
        self._launch(
            StepPlan(self._step_id, "prefill", (0,), (0,)), self.world.chunk_ms, self.world.prompt_ms, []
        )
        self.waiting -= 1
        self.requests.append(self._next)
        self._next += 1

    def _round(self, *, counts: bool) -> None:
        world, requests = self.world, tuple(self.requests)
        depth = self.policy.choose(len(requests), 60, is_two_phase=False)
        num_drafts, self._chain = min(depth, self._chain), depth
        rates = [world.rate(self.num_rounds, one) for one in requests]
        size = SIZES[bisect_left(SIZES, len(requests))]
        ms = world.ms[size]
        if counts:
            # Its time without noise, and the time of fixed depths for its expected tokens.
            self.depths.append(depth)
            self.auto_ms += ms[depth]
            tokens = sum(_expected(rate, num_drafts) for rate in rates)
            for fixed in DEPTHS:
                self.fixed_ms[fixed] += ms[fixed] * tokens / sum(_expected(rate, fixed) for rate in rates)
        plan = StepPlan(
            self._step_id,
            "decode",
            requests,
            requests,
            shape=RoundShape(depth, depth),
            num_drafts=num_drafts,
        )
        token_ids = [self._tokens(rate, num_drafts) for rate in rates]
        self._launch(plan, 0.1, self._spent_ms(ms[depth], (depth, size)), token_ids)
        self.num_rounds += 1
        for one, new in zip(requests, token_ids, strict=True):
            if world.tokens is not None and self.chance.random() < len(new) / world.tokens:
                self.requests.remove(one)
                self.waiting += 1

    def _tokens(self, rate: float, num_drafts: int) -> list[int]:
        kept = 0
        while kept < num_drafts and self.chance.random() < rate:
            kept += 1
        return [0] * (kept + 1)

    def _spent_ms(self, ms: float, program: tuple[int, int]) -> float:
        world = self.world
        spent = ms * (1 + world.noise * self.chance.gauss(0, 1))
        spent *= 3 if self.chance.random() < world.hiccups else 1
        if program not in self._ready:
            self._ready.add(program)
            spent += world.cold_ms
        return spent
