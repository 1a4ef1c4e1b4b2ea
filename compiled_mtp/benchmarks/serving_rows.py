"""Rows of a load on a service: drawn lengths, percentiles, and the rows of other engines beside them.

No torch and no client: what measures over HTTP and what measures in one process print the same row.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from compiled_mtp.benchmarks.saved_rows import Row, describe_beside, rows_beside

PERCENTILES = (50, 90, 99)
# Two rows that agree in these fields measure the same load.
CASE_FIELDS = ("device", "shape", "weights", "streams", "requests", "mean_prompt", "mean_output")
SAVED_FIELDS = {*CASE_FIELDS, "engine", "tokens_per_s"}
# What is shown of a saved row. Percentiles, "p50", "p90" and "p99", may be missing.
FIGURES = ("tokens_per_s", "ttft_ms", "tpot_ms")
# Ids of drawn prompts lie below this: every released vocabulary has them, and none is a special token.
DRAWN_IDS = 1000
# The standard deviation of a length's logarithm, and the longest length in means.
_SPREAD, _LONGEST = 0.6, 8


class MeanLengths(NamedTuple):
    """The mean tokens of a load's prompts and outputs, whose lengths are lognormal."""

    prompt: int
    output: int

    @property
    def longest(self) -> int:
        """The most tokens of a request."""
        return _LONGEST * (self.prompt + self.output)

    def draw(self, count: int, seed: int) -> list[tuple[int, int]]:
        """Return tokens of prompt and output of each of `count` requests, at least 1."""
        rng = random.Random(seed)
        return [(_draw(self.prompt, rng), _draw(self.output, rng)) for _ in range(count)]


def mean_lengths(text: str) -> MeanLengths:
    """Parse a flag's mean lengths, PROMPT:OUTPUT."""
    parts = text.split(":")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"must be two integers from 1 on, PROMPT:OUTPUT, got {text!r}")
    return MeanLengths(*map(int, parts))


def _draw(mean: int, rng: random.Random) -> int:
    drawn = rng.lognormvariate(math.log(mean) - _SPREAD**2 / 2, _SPREAD)
    return max(1, min(round(drawn), _LONGEST * mean))


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the value below which `percent` % lie, by linear interpolation; 0 without values."""
    if len(values) < 2:
        return sum(values)
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return "p50", "p90" and "p99" of the values."""
    return {f"p{percent}": round(percentile(values, percent), 2) for percent in PERCENTILES}


def with_beside(row: Row, saved: Sequence[Row]) -> tuple[dict[str, Any], str]:
    """Return the row with the throughput and latencies of saved rows of its load, and a line about these, ""
    for none."""
    same = [other for other in saved if all(other[name] == row[name] for name in CASE_FIELDS)]
    named = [(other["engine"], {name: other[name] for name in FIGURES if name in other}) for other in same]
    beside = [{"engine": engine, **figures} for engine, figures in named]
    throughputs = rows_beside(saved, row, CASE_FIELDS, "tokens_per_s")
    texts = [describe_beside(throughputs, row["tokens_per_s"], "tokens/s", 0)]
    for engine, figures in named:
        for name, title in (("ttft_ms", "first token"), ("tpot_ms", "each later token")):
            if name in figures:
                spans = [
                    f"{found['p50']:.1f} (p99 {found['p99']:.1f})" for found in (figures[name], row[name])
                ]
                texts.append(f"{engine}: {title} {spans[0]} ms, ours {spans[1]}")
    return {**row, "beside": beside}, "; ".join(filter(None, texts))
