"""Which tile a four-bit product has, and how many programs split one before a norm. Neither decides a bit."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from compiled_mtp.ops.k_splits import NARROW_ROWS, part_counts

# Measured on an H200: of fewer programs a tile is too large.
MIN_PROGRAMS = 120
BLOCKS = (128, 64, 32, 16)


@dataclass(frozen=True)
class W4A16Config:
    """One launch configuration.

    A tile has `row_tiles` products of `block_m` rows, which share what is decoded of `block_n` weight rows.
    prefetch_bytes: of each weight row, sent to L2 before the previous kernel has finished.
    """

    block_m: int
    row_tiles: int
    block_n: int
    num_warps: int
    num_stages: int
    prefetch_bytes: int = 256

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return self.block_m * self.row_tiles

    def stage_bytes(self) -> int:
        """Shared memory of one pipeline stage: rows in bfloat16, words, scales."""
        return self.rows * 256 + self.block_n * (64 + 16)


def configuration(rows: int, n: int, split: int, shared_bytes: int) -> W4A16Config:
    """The tile for `rows` rows of a weight of `n` rows, whose K `split` programs sum."""
    block_m, row_tiles = (16, 1) if rows <= NARROW_ROWS else (32, 1) if rows <= 32 else (32, 2)
    fitting = [block for block in BLOCKS if block <= n] or [BLOCKS[-1]]
    enough = [block for block in fitting if -(-n // block) * split >= MIN_PROGRAMS]
    block_n = enough[0] if enough else fitting[-1] if fitting[0] <= 32 else min(fitting[0], 64)
    config = W4A16Config(block_m, row_tiles, block_n, 4 if block_n >= 64 else 2, 4 if rows <= 16 else 3)
    stages = min(config.num_stages, (shared_bytes - 4096) // config.stage_bytes())
    return W4A16Config(block_m, row_tiles, block_n, config.num_warps, max(2, stages))


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
