"""The sizes of GDN rings."""

from __future__ import annotations

import pytest
import torch

from compiled_mtp.cache.state_cache import StateCache
from tests import tiny


@pytest.mark.parametrize(
    ("max_drafts", "usual_drafts", "ring", "max_unfolded"),
    [
        (0, None, 4, 2),
        (3, None, 8, 4),
        (5, 5, 16, 8),
        (7, 5, 16, 8),
        (15, 0, 32, 4),
        (3, 3, 8, 4),
        (7, 3, 16, 8),
        (15, 3, 32, 8),
        (15, 5, 32, 8),
        (15, None, 32, 8),
    ],
)
def test_longer_rings_leave_no_more_entries_unfolded(
    max_drafts: int, usual_drafts: int | None, ring: int, max_unfolded: int
) -> None:
    config = tiny.tiny_config()
    for device, limit in (("meta", max_unfolded), ("cpu", 0)):
        cache = StateCache(config, 2, max_drafts, torch.float32, torch.device(device), usual_drafts)
        assert (cache.ring_length, cache.max_unfolded) == (ring, limit)
        # After any round, its entries and the next window fit.
        assert max(cache.max_unfolded, max_drafts + 1) + max_drafts + 1 <= ring
