"""How host memory is allocated: in powers of two, with little waste."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from compiled_mtp.cache import host_tier
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


def test_with_a_gpu_memory_is_allocated_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first buffer is allocated when it is taken; no more is allocated than the tier holds."""
    makers: list[tuple[int, str]] = []

    def allocate(num_bytes: int, is_pinned: bool) -> torch.Tensor:
        assert is_pinned
        makers.append((num_bytes, threading.current_thread().name.split("_")[0]))
        return torch.empty(num_bytes, dtype=torch.uint8)

    monkeypatch.setattr(host_tier, "_allocate", allocate)
    tier = HostTier(3 * MIB // 2, MIB, 4, 16 * 3, torch.device("cuda"))
    row, segment = [MIB, MIB // 2], 16 * MIB
    assert not makers
    tier.reserve(0, [0])
    wait_for(tier, 3 * sum(row) + 3 * segment)
    tier.reserve(3, [47])
    wait_for(tier, 4 * sum(row) + 3 * segment)
    tier.reserve(1, range(48))
    tier.reserve(2, range(48))
    own = [size for size, name in makers if name == "MainThread"]
    assert own == [*row, segment]
    assert sorted(size for size, _ in makers) == sorted([*row * 4, *[segment] * 3])
    assert {buffer.numel() for record in range(4) for buffer in tier.buffers(record)} == set(row)


def test_a_failed_allocation_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    is_short, calls = [False], [0]

    def allocate(num_bytes: int, is_pinned: bool) -> torch.Tensor:
        calls[0] += 1
        if is_short[0]:
            raise RuntimeError("no memory to pin")
        is_short[0] = True
        return torch.empty(num_bytes, dtype=torch.uint8)

    monkeypatch.setattr(host_tier, "_allocate", allocate)
    tier = HostTier(MIB, MIB, 4, 0, torch.device("cuda"))
    tier.reserve(0, [])
    with pytest.raises(RuntimeError, match="no memory to pin"):
        tier.reserve(1, [])
    # The thread's other attempt is over.
    deadline = time.monotonic() + 10
    while calls[0] < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    is_short[0] = False
    tier.reserve(1, [])
    assert tier.allocated_bytes == 2 * MIB


def wait_for(tier: HostTier, num_bytes: int) -> None:
    deadline = time.monotonic() + 10
    while tier.allocated_bytes < num_bytes and time.monotonic() < deadline:
        time.sleep(0.01)
    assert tier.allocated_bytes == num_bytes


def test_no_copy_exceeds_most_bytes_at_once() -> None:
    for row_bytes, most in ((3000, 5000), (7000, 7000)):
        tier = HostTier(row_bytes, 1000, 2, 5, torch.device("cpu"))
        tier.reserve(0, range(5))
        (run,) = tier.runs(range(5))
        assert max(run.memory.numel(), *(buffer.numel() for buffer in tier.buffers(0))) == most
        assert tier.most_bytes_at_once == most
