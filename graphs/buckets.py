"""The shapes that are compiled: the rows of a decode bucket, and the padded length of a prefill launch.

Pure arithmetic. The rows of a decode bucket are whole groups, one per request: one row for each draft that
the round verifies, and one for the last token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import lcm
from typing import NamedTuple

from compiled_mtp.ops.prompt_chunks import MAX_PROMPT_CHUNKS, PROMPT_CHUNK_MULTIPLE

PREFILL_MULTIPLE = 64
"""Prefill launches are padded to a multiple of this: the chunk of the gated delta rule."""
# Rounds of fewer requests wait for weights, so that padding costs little.
_MANY_REQUESTS = 32
# Rows of a prefill launch per prompt chunk that it has room for.
_LEAST_ROWS_EACH = 32


class RoundShape(NamedTuple):
    """A round of each request: the numbers of drafts that it verifies and that its chain leaves."""

    verify: int
    chain: int


NO_DRAFTS = RoundShape(0, 0)


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """A decode shape: `rows` rows, in groups of shape.verify + 1 rows per request."""

    rows: int
    shape: RoundShape

    @property
    def groups(self) -> int:
        """Number of requests that fit."""
        return self.rows // (self.shape.verify + 1)


def ladder(
    unit: int, shape: RoundShape, max_batch: int, batch_sizes: Sequence[int] | None = None
) -> tuple[Bucket, ...]:
    """Return the buckets of one round shape, smallest first: rows double until they cover max_batch requests.

    Above _MANY_REQUESTS a bucket in the middle between two follows each: there every row takes time, also one
    of padding. Rows are multiples of lcm(unit, verify + 1), where `unit` is the row granularity of the
    backend; the last bucket is the smallest multiple that covers max_batch. With `batch_sizes` the buckets
    are exactly those that cover these batches and max_batch. Raises ValueError for a number out of range.
    """
    _check("unit", unit, 1)
    _check("verify", shape.verify, 0)
    _check("chain", shape.chain, 0)
    _check("max_batch", max_batch, 1)
    query_len = shape.verify + 1
    step = lcm(unit, query_len)
    if batch_sizes is None:
        counts = _doubling(-(-max_batch * query_len // step))
        counts = _with_middles(counts, -(-_MANY_REQUESTS * query_len // step))
    else:
        counts = tuple(sorted({-(-batch * query_len // step) for batch in (*batch_sizes, max_batch)}))
    return tuple(Bucket(count * step, shape) for count in counts)


def ladders(
    unit: int, shapes: Iterable[RoundShape], max_batch: int, batch_sizes: Sequence[int] | None = None
) -> tuple[Bucket, ...]:
    """Return the buckets of all rounds of these shapes."""
    return tuple(
        bucket for shape in sorted(set(shapes)) for bucket in ladder(unit, shape, max_batch, batch_sizes)
    )


def pick(buckets: Iterable[Bucket], num_requests: int, shape: RoundShape) -> Bucket:
    """Return the first of `buckets` (sorted by rows) of that shape that holds num_requests.

    Raises ValueError if none does.
    """
    _check("num_requests", num_requests, 1)
    largest = 0
    for bucket in buckets:
        if bucket.shape == shape:
            if bucket.groups >= num_requests:
                return bucket
            largest = bucket.groups
    if not largest:
        raise ValueError(
            f"round must have a shape that programs were made for, got {shape}; name it when they are made"
        )
    raise ValueError(f"num_requests must be at most {largest}, got {num_requests}; raise max_batch")


def sharing(sizes: Iterable[int]) -> frozenset[int]:
    """Return the batch sizes whose rounds share one program, traced and compiled once.

    These are all sizes above 1, if there are several. A batch of one request has its own program: the
    compiler treats a size of 1 as a constant and makes faster code of it.
    """
    several = frozenset(size for size in sizes if size > 1)
    return several if len(several) > 1 else frozenset()


def prefill_lengths(prefill_chunk: int, *, has_middles: bool = False) -> tuple[int, ...]:
    """Return the padded lengths of prefill launches, smallest first: doubling from 64 up to prefill_chunk.

    has_middles: a length in the middle between two follows each, if it is a multiple of 64. Raises ValueError
    unless prefill_chunk is a positive multiple of 64.
    """
    if prefill_chunk < 1 or prefill_chunk % PREFILL_MULTIPLE:
        raise ValueError(
            f"prefill_chunk must be a positive multiple of {PREFILL_MULTIPLE}, got {prefill_chunk}; "
            f"{PREFILL_MULTIPLE * max(1, -(-prefill_chunk // PREFILL_MULTIPLE))} is the next one"
        )
    counts = _doubling(prefill_chunk // PREFILL_MULTIPLE)
    if has_middles:
        counts = _with_middles(counts, 2)
    return tuple(count * PREFILL_MULTIPLE for count in counts)


def prompt_chunk_limit(length: int, max_batch: int) -> int:
    """Return how many prompt chunks a launch of `length` rows holds.

    Short launches hold fewer: an empty chunk costs them a larger share of their time.
    """
    return max(min(length // _LEAST_ROWS_EACH, max_batch, MAX_PROMPT_CHUNKS), 1)


def lay_out(counts: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Return the first rows of prompt chunks of `counts` tokens in one launch, and the row after the last."""
    first_rows, end = [], 0
    for count in counts:
        first_rows.append(-(-end // PROMPT_CHUNK_MULTIPLE) * PROMPT_CHUNK_MULTIPLE)
        end = first_rows[-1] + count
    return tuple(first_rows), end


def pick_prefill_length(lengths: Sequence[int], num_rows: int, num_chunks: int, max_batch: int) -> int:
    """Return the smallest of `lengths` (sorted) that holds num_rows rows and num_chunks prompt chunks.

    Raises ValueError if none does.
    """
    _check("num_rows", num_rows, 1)
    for length in lengths:
        if length >= num_rows and prompt_chunk_limit(length, max_batch) >= num_chunks:
            return length
    most = (lengths[-1], prompt_chunk_limit(lengths[-1], max_batch))
    raise ValueError(
        f"num_rows and num_chunks must be at most {most[0]} and {most[1]}, got {num_rows} and {num_chunks}; "
        "prefill in several launches"
    )


def _doubling(last: int) -> tuple[int, ...]:
    counts = [1]
    while counts[-1] < last:
        counts.append(min(2 * counts[-1], last))
    return tuple(counts)


def _with_middles(counts: Sequence[int], least: int) -> tuple[int, ...]:
    """Add to counts, from `least` on, the middle between each and its double."""
    doubled = [low for low, high in pairwise(counts) if low >= least and high == 2 * low]
    return tuple(sorted({*counts, *(3 * low // 2 for low in doubled)}))


def _check(name: str, value: int, low: int) -> None:
    if value < low:
        raise ValueError(f"{name} must be at least {low}, got {value}; raise it")
