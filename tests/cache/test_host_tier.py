"""How host memory is taken: in powers of two, little of which is lost."""

from __future__ import annotations

import pytest
import torch

from compiled_mtp.cache.host_tier import SEGMENT_BYTES, HostTier, blocks_in_segment

MIB = 1 << 20


@pytest.mark.parametrize(
    ("block_bytes", "count"),
    [
        (MIB, 16),
        (17 * MIB // 4, 7),
        (9 * MIB, 7),
        (64 * MIB, 1),
        (65 * MIB, 1),
        (1000, SEGMENT_BYTES // 1000),
    ],
)
def test_a_segment_fills_a_power_of_two(block_bytes: int, count: int) -> None:
    assert blocks_in_segment(block_bytes) == count


def test_little_of_a_segment_is_lost() -> None:
    for block_bytes in range(1 << 16, 6 * MIB, 99_991):
        used = blocks_in_segment(block_bytes) * block_bytes
        assert used / (1 << (used - 1).bit_length()) > 0.9


def test_one_copy_takes_what_is_said_at_most() -> None:
    for row_bytes, most in ((3000, 5000), (7000, 7000)):
        tier = HostTier(row_bytes, 1000, 2, 5, torch.device("cpu"))
        tier.reserve(0, range(5))
        (run,) = tier.runs(range(5))
        assert max(run.memory.numel(), *(piece.numel() for piece in tier.pieces(0))) == most
        assert tier.most_bytes_at_once == most
