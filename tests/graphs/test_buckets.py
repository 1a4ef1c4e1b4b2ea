"""Every batch and every chunk fits a bucket, in whole groups, with little waste."""

from __future__ import annotations

from itertools import starmap
from math import ceil, lcm

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiled_mtp.graphs.buckets import (
    Bucket,
    RoundShape,
    ladder,
    ladders,
    lay_out,
    pick,
    pick_prefill_length,
    prefill_lengths,
    prompt_chunk_limit,
    sharing,
)
from compiled_mtp.ops.prompt_chunks import MAX_PROMPT_CHUNKS, PROMPT_CHUNK_MULTIPLE


def test_several_sizes_from_two_on_share_a_program() -> None:
    assert sharing([1, 2, 8, 32]) == sharing([8, 2, 32]) == {2, 8, 32}
    assert sharing([1, 8]) == sharing([1]) == sharing([]) == set()


@given(unit=st.integers(1, 16), mtp_step=st.integers(0, 8), max_batch=st.integers(1, 300))
def test_every_batch_fits_in_whole_groups_with_little_waste(unit: int, mtp_step: int, max_batch: int) -> None:
    buckets, query_len = ladder(unit, RoundShape(mtp_step, mtp_step), max_batch), mtp_step + 1
    step = lcm(unit, query_len)
    assert list(buckets) == sorted(set(buckets))
    assert buckets[-1].rows == ceil(max_batch * query_len / step) * step
    for bucket in buckets:
        assert bucket.shape == (mtp_step, mtp_step)
        assert bucket.rows % unit == 0
        assert bucket.groups * query_len == bucket.rows
    doublings = ceil(max_batch * query_len / step).bit_length()
    assert len(buckets) <= 2 + doublings + max(max_batch.bit_length() - 5, 0)
    for num_requests in range(1, max_batch + 1):
        bucket = pick(buckets, num_requests, RoundShape(mtp_step, mtp_step))
        assert bucket.groups >= num_requests
        assert all(other.groups < num_requests for other in buckets if other < bucket)
        if num_requests >= step // query_len:
            assert 2 * num_requests * query_len > bucket.rows


@pytest.mark.parametrize(
    "unit, mtp_step, max_batch, rows",
    [
        (1, 3, 8, [4, 8, 16, 32]),
        (4, 3, 8, [4, 8, 16, 32]),
        (4, 2, 8, [12, 24]),
        (4, 0, 8, [4, 8]),
        (1, 0, 1, [1]),
        (8, 1, 9, [8, 16, 24]),
        (1, 0, 256, [1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256]),
        (1, 0, 100, [1, 2, 4, 8, 16, 32, 48, 64, 100]),
        (8, 5, 64, [24, 48, 96, 192, 288, 384]),
    ],
)
def test_ladders(unit: int, mtp_step: int, max_batch: int, rows: list[int]) -> None:
    assert [bucket.rows for bucket in ladder(unit, RoundShape(mtp_step, mtp_step), max_batch)] == rows


@given(chunks=st.integers(1, 40), data=st.data())
def test_prefill_lengths_cover_every_chunk(chunks: int, data: st.DataObject) -> None:
    lengths = prefill_lengths(64 * chunks)
    assert lengths[0] == 64
    assert lengths[-1] == 64 * chunks
    assert all(length % 64 == 0 for length in lengths)
    num_rows = data.draw(st.integers(1, 64 * chunks))
    length = pick_prefill_length(lengths, num_rows, 1, 8)
    assert num_rows <= length
    assert length == 64 or length < 2 * num_rows
    closer = prefill_lengths(64 * chunks, has_middles=True)
    assert set(closer) >= set(lengths)
    assert all(length % 64 == 0 for length in closer)
    assert num_rows <= pick_prefill_length(closer, num_rows, 1, 8) <= length


def test_lengths_in_the_middle_follow_each_that_doubles() -> None:
    assert prefill_lengths(1024, has_middles=True) == (64, 128, 192, 256, 384, 512, 768, 1024)
    # 320 is no double of 256.
    assert prefill_lengths(320, has_middles=True) == (64, 128, 192, 256, 320)


@given(counts=st.lists(st.integers(1, 100), min_size=1, max_size=MAX_PROMPT_CHUNKS))
def test_chunks_lie_side_by_side(counts: list[int]) -> None:
    first_rows, end = lay_out(counts)
    assert all(row % PROMPT_CHUNK_MULTIPLE == 0 for row in first_rows)
    ends = [row + count for row, count in zip(first_rows, counts, strict=True)]
    assert end == ends[-1]
    gaps = [row - last for row, last in zip(first_rows, [0, *ends[:-1]], strict=True)]
    assert all(0 <= gap < PROMPT_CHUNK_MULTIPLE for gap in gaps)
    lengths = prefill_lengths(2048)
    length = pick_prefill_length(lengths, end, len(counts), MAX_PROMPT_CHUNKS)
    assert prompt_chunk_limit(length, MAX_PROMPT_CHUNKS) >= len(counts)
    shorter = [other for other in lengths if other < length]
    assert all(other < end or prompt_chunk_limit(other, MAX_PROMPT_CHUNKS) < len(counts) for other in shorter)


def test_a_launch_has_as_many_chunks_as_its_rows_and_the_batch_allow() -> None:
    assert [prompt_chunk_limit(length, 32) for length in (16, 64, 256, 512, 2048)] == [
        1,
        2,
        8,
        16,
        MAX_PROMPT_CHUNKS,
    ]
    assert [prompt_chunk_limit(2048, max_batch) for max_batch in (1, 3, 100)] == [1, 3, MAX_PROMPT_CHUNKS]


def test_buckets_of_several_depths_have_different_names() -> None:
    buckets = ladders(1, starmap(RoundShape, [(3, 0), (0, 3), (0, 0), (3, 3), (3, 0)]), 4)
    assert {b.shape for b in buckets} == {(0, 0), (0, 3), (3, 0), (3, 3)}
    assert len(set(buckets)) == len(buckets) == 12
    assert pick(buckets, 3, RoundShape(0, 3)) == Bucket(4, RoundShape(0, 3))
    assert pick(buckets, 3, RoundShape(3, 0)) == Bucket(16, RoundShape(3, 0))
    with pytest.raises(
        ValueError, match=r"^round must have a shape .*, got RoundShape.verify=3, chain=1.; name"
    ):
        pick(buckets, 3, RoundShape(3, 1))


def test_bad_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^chain must be at least 0, got -1"):
        ladder(1, RoundShape(3, -1), 8)
    with pytest.raises(ValueError, match=r"^unit must be at least 1, got 0"):
        ladder(0, RoundShape(3, 3), 8)
    with pytest.raises(ValueError, match=r"^verify must be at least 0, got -1"):
        ladder(1, RoundShape(-1, 3), 8)
    with pytest.raises(ValueError, match=r"^max_batch must be at least 1, got 0"):
        ladder(1, RoundShape(3, 3), 0)
    with pytest.raises(ValueError, match=r"^num_requests must be at most 2, got 3; raise max_batch"):
        pick((Bucket(8, RoundShape(3, 3)),), 3, RoundShape(3, 3))
    with pytest.raises(ValueError, match=r"^num_requests must be at least 1, got 0"):
        pick((Bucket(8, RoundShape(3, 3)),), 0, RoundShape(3, 3))
    for chunk in (0, 100):
        with pytest.raises(
            ValueError, match=rf"^prefill_chunk must be a positive multiple of 64, got {chunk}"
        ):
            prefill_lengths(chunk)
    for num_rows, num_chunks in ((65, 1), (64, 3)):
        with pytest.raises(
            ValueError,
            match=rf"^num_rows and num_chunks must be at most 64 and 2, got {num_rows} and {num_chunks}; ",
        ):
            pick_prefill_length((64,), num_rows, num_chunks, 8)
