"""Which tile a four-bit product has, and how many programs split one before a norm. Neither decides a bit."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from compiled_mtp.ops.k_splits import NARROW_ROWS, part_counts


@dataclass(frozen=True)
class W4A16Config:
    """One launch configuration: tiles of `block_m` rows and `block_n` weight rows.

    A warp has one or two blocks of 16 weight rows, and loads them `depth` units ahead. is_shared: the warps
    share the rows in shared memory, else each reads them through L1.
    """

    block_m: int
    block_n: int
    num_warps: int
    depth: int
    is_shared: bool

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a program."""
        return self.depth * self.block_m * 256 if self.is_shared else 0


def configuration(rows: int, n: int, split: int, gated: bool) -> W4A16Config:
    """The tile for `rows` rows of a weight of `n` rows, whose K `split` programs sum.

    A gated tile has a block of the gate and one of up for each warp.
    """
    if rows <= NARROW_ROWS:
        block_m = 8 if rows <= 8 else 16
        return W4A16Config(block_m, 64, 2 if gated else 4, 4, False)
    return W4A16Config(32 if rows <= 32 else 64, 128, 4, 2, True)


def count_partials(weight: torch.Tensor, rows: int, whole_k: int = 0) -> int:
    """In how many parts `linear_w4a16_partials` fills the processors with this weight; 1 on a CPU. No count
    changes a bit.

    whole_k: K of the weight of which `weight` holds neighbouring K splits, 0 if it is whole.
    """
    if weight.device.type != "cuda":
        return 1
    # Measured with 27B's down and out at 4 to 128 rows: one K split a program is the fastest.
    k = weight.shape[1] * 4
    return part_counts(k, whole_k or k)[-1]
