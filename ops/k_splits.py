"""The order in which a product before a norm is summed: equal K splits, added as a tree.

The order is the same for every number of programs, or of devices with a weight shard each: every one of them
sums a subtree, and the norm or the communicator adds the subtrees.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

K_SPLIT_UNIT = 128  # a block of FP8 scales, which every tile of K divides
CPU_K_SPLITS = 4
# Up to this number of rows a product reads its weight once, in narrow tiles; above, it is a large-M product.
NARROW_ROWS = 16
# Above this number of rows the processors have enough tiles, and partials cost more than they bring.
WIDE_ROWS = 128


def count_k_splits(k: int) -> int:
    """Return the number of K splits of a product before a norm: equal, in whole blocks of K_SPLIT_UNIT.

    It is eight if that divides K's blocks. Of the released shapes, 0.8B's down (3,584 columns, 28 blocks) and
    experts of 512 columns have four.
    """
    return next((count for count in (8, 4, 2) if k % (count * K_SPLIT_UNIT) == 0), 1)


def count_cpu_k_splits(k: int) -> int:
    """Return the number of K splits on a CPU: four if that divides K, of any length.

    Four is also the largest number of CPU ranks. More splits would be slower: each is a product of its own.
    """
    return next(count for count in (CPU_K_SPLITS, 2, 1) if k % count == 0)


def add_tree(partials: Sequence[torch.Tensor] | torch.Tensor) -> torch.Tensor:
    """Return ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)) of 1, 2, 4 or 8 partials."""
    half = len(partials) // 2
    return partials[0] if half == 0 else add_tree(partials[:half]) + add_tree(partials[half:])


def part_counts(k: int, whole_k: int) -> tuple[int, ...]:
    """Return the numbers of subtrees that can share a sum over `k` of a weight's `whole_k` columns."""
    k_splits = count_k_splits(whole_k) * k // whole_k
    return tuple(count for count in (1, 2, 4, 8) if count <= k_splits)
