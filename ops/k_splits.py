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


def add_splits(sums: Sequence[torch.Tensor], count: int, stacked: bool) -> torch.Tensor:
    """Add the K splits [M, N] to partials [count, M, N], one per subtree, or stacked to [count * M, N]."""
    size = len(sums) // count
    partials = [add_tree(sums[first : first + size]) for first in range(0, len(sums), size)]
    return torch.cat(partials) if stacked else torch.stack(partials)


def new_partials(
    x: torch.Tensor, weight: torch.Tensor, count: int, stacked: bool, dtype: torch.dtype
) -> torch.Tensor:
    """Allocate the partials of x [M, K] and weight [N, K] as `add_splits` shapes them.

    dtype: of partials that are not stacked; stacked ones are float32.
    """
    if stacked:
        return x.new_empty((count * x.shape[0], weight.shape[0]), dtype=torch.float32)
    return x.new_empty((count, x.shape[0], weight.shape[0]), dtype=dtype)


def is_sum(k: int, count: int, whole_k: int) -> bool:
    """Return whether `count` partials over `k` of a weight's columns are one whole sum, which is rounded.

    whole_k: the weight's columns, 0 if `k` are all of them.
    """
    return count == 1 and (whole_k or k) == k


def part_counts(k: int, whole_k: int) -> tuple[int, ...]:
    """Return the numbers of subtrees that can share a sum over `k` of a weight's `whole_k` columns."""
    k_splits = count_k_splits(whole_k) * k // whole_k
    return tuple(count for count in (1, 2, 4, 8) if count <= k_splits)
