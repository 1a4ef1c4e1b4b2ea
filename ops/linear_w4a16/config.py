"""Which tile a four-bit product has, and how many programs split one before a norm. Neither decides a bit."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from compiled_mtp.ops.k_splits import NARROW_ROWS, part_counts

# Of an H200's 132 processors: of fewer programs a tile is too large.
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


@dataclass(frozen=True)
class FewRowsTile:
    """One launch configuration of a product of few rows.

    A tile has `block_m` rows and `block_n` weight rows, one or two blocks of 16 per warp. chunk: units that a
    stage of shared memory holds.
    """

    block_m: int
    block_n: int
    num_warps: int
    chunk: int
    num_stages: int


def few_rows_tile(rows: int, n: int, split: int, gated: bool) -> FewRowsTile:
    """The tile for up to 16 rows of a weight of `n` rows, whose K `split` programs sum.

    Measured on an H100 at 27B's sizes with 1 to 16 rows. A gated tile has two blocks per warp, one of the
    gate and one of up.
    """
    if gated or -(-n // 64) * split >= 4 * MIN_PROGRAMS:
        return FewRowsTile(8, 64, 2, 2, 3) if rows <= 8 else FewRowsTile(16, 64, 2, 1, 4)
    return FewRowsTile(8, 32, 2, 4, 3) if rows <= 8 else FewRowsTile(16, 64, 4, 2, 6)


def configuration(rows: int, n: int, split: int, shared_bytes: int) -> W4A16Config:
    """The tile for `rows` rows of a weight of `n` rows, whose K `split` programs sum: measured on an H200 at
    27B's sizes with 4 to 128 rows."""
    if rows <= NARROW_ROWS:
        block_m, row_tiles, stages, widest = 16, 1, 6, 64 if split > 1 else 128
    elif rows <= 32:
        block_m, row_tiles, stages, widest = 32, 1, 3, 128
    else:
        block_m, stages, widest = 32, 3, 128
        # One program per processor with all of 64 rows is faster than two with half of them each.
        row_tiles = 2 if rows > 64 or MIN_PROGRAMS <= -(-n // 128) * split <= 132 else 1
    fitting = [block for block in BLOCKS if block <= min(n, widest)]
    block_n = next((block for block in fitting if -(-n // block) * split >= MIN_PROGRAMS), fitting[-1])
    config = W4A16Config(block_m, row_tiles, block_n, 4 if block_n == 128 else 2, stages)
    return replace(config, num_stages=max(2, min(stages, (shared_bytes - 4096) // config.stage_bytes())))


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
