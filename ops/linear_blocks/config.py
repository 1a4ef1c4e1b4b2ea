"""Which tile a product of scaled codes has, and how many programs split one before a norm. Neither decides a
bit."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from compiled_mtp.ops.blocks import KINDS, Kind
from compiled_mtp.ops.k_splits import NARROW_ROWS, part_counts

# Of an H200's 132 processors: of fewer programs a tile is too large.
MIN_PROGRAMS = 120
BLOCKS = (128, 64, 32, 16)


@dataclass(frozen=True)
class BlocksConfig:
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

    def stage_bytes(self, kind: Kind) -> int:
        """Shared memory of one pipeline stage: rows in bfloat16, words, scales."""
        return self.rows * 256 + self.block_n * (2 * kind.words + 4 * -(-kind.fields // 2))


def configuration(rows: int, n: int, split: int, shared_bytes: int, kind: Kind) -> BlocksConfig:
    """The tile for `rows` rows of a weight of `n` rows, whose K `split` programs sum."""
    if rows <= NARROW_ROWS:
        block_m, row_tiles, stages, widest = 16, 1, 5, 64
    elif rows <= 32:
        block_m, row_tiles, stages, widest = 32, 1, 3, 128
    else:
        block_m, row_tiles, stages, widest = 32, 2 if rows > 64 else 1, 3, 128
    fitting = [block for block in BLOCKS if block <= min(n, widest)]
    block_n = next((block for block in fitting if -(-n // block) * split >= MIN_PROGRAMS), fitting[-1])
    config = BlocksConfig(block_m, row_tiles, block_n, 4 if block_n == 128 else 2, stages)
    most = (shared_bytes - 4096) // config.stage_bytes(kind)
    return replace(config, num_stages=max(2, min(stages, most)))


def count_partials(weight: torch.Tensor, rows: int, kind: str, whole_k: int = 0) -> int:
    """In how many parts `linear_blocks_partials` fills the processors with this weight; 1 on a CPU. No count
    changes a bit.

    whole_k: K of the weight of which `weight` holds neighbouring K splits, 0 if it is whole.
    """
    if weight.device.type != "cuda":
        return 1
    k = KINDS[kind].columns(weight.shape[1])
    return part_counts(k, whole_k or k)[-1]
