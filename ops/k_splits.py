"""The order in which a product before a norm is summed: equal shares of K, added as a tree.

It is one order however many programs, or devices that hold a piece of the weight each, split the work: each
sums a subtree, and whoever adds up goes on with the tree.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

K_SPLIT_UNIT = 128  # a block of FP8 scales, which every tile of K divides
CPU_K_SPLITS = 4
# Up to so many rows a product reads its weight once, in narrow tiles; more are a product of their own kind.
NARROW_ROWS = 16


def count_k_splits(k: int) -> int:
    """Equal shares of K columns, in whole blocks of K_SPLIT_UNIT, that a product before a norm is cut into.

    Eight where they come out even. Of the released shapes 0.8B's down (3,584 columns, 28 blocks) and experts
    of 512 have four.
    """
    return next((count for count in (8, 4, 2) if k % (count * K_SPLIT_UNIT) == 0), 1)


def count_cpu_k_splits(k: int) -> int:
    """The shares of K columns on a CPU: four where they come out even, of any length.

    More would cost more, since each is a product of its own there: the most ranks that share a CPU's work.
    """
    return next(count for count in (CPU_K_SPLITS, 2, 1) if k % count == 0)


def add_tree(partials: Sequence[torch.Tensor] | torch.Tensor) -> torch.Tensor:
    """((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)) of 1, 2, 4 or 8 parts."""
    half = len(partials) // 2
    return partials[0] if half == 0 else add_tree(partials[:half]) + add_tree(partials[half:])


def part_counts(k: int, whole_k: int) -> tuple[int, ...]:
    """The numbers of subtrees in which K of a weight's whole_k columns can be summed."""
    k_splits = count_k_splits(whole_k) * k // whole_k
    return tuple(count for count in (1, 2, 4, 8) if count <= k_splits)
