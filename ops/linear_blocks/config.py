"""Which tile a product of scaled codes has, and how many programs split one before a norm. Neither decides a
bit."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from compiled_mtp.ops.blocks import KINDS, Kind
from compiled_mtp.ops.k_splits import part_counts

# Of an H100's and an H200's 132 processors: of fewer programs a tile is too large.
MIN_PROGRAMS = 120


@dataclass(frozen=True)
class BlocksTile:
    """One launch configuration.

    A tile has `block_m` rows and `block_n` weight rows, one or two blocks of 16 for each warp. chunk: units
    that a stage of shared memory holds.
    """

    block_m: int
    block_n: int
    num_warps: int
    chunk: int
    num_stages: int

    def shared_bytes(self, kind: Kind) -> int:
        """Shared memory of a program: rows in bfloat16, words."""
        return self.num_stages * self.chunk * (self.block_m * 256 + self.block_n * 2 * kind.words)


def tile_of(rows: int, n: int, split: int, gated: bool, kind: Kind) -> BlocksTile:
    """The tile for `rows` rows of a weight of `n` rows, whose K `split` programs sum: measured on an H100 at
    27B's sizes with 4 to 128 rows.

    A gated tile has two blocks for each warp, one of the gate and one of up.
    """
    if rows > 32:
        return BlocksTile(64, 128, 4, 1, 3)
    block_m = 8 if rows <= 8 else 16 if rows <= 16 else 32
    stages = 3 if block_m == 32 else 4
    if gated:
        return BlocksTile(8, 128, 4, 1, 4) if block_m == 8 else BlocksTile(block_m, 64, 2, 1, stages)
    if -(-n // 64) * split < MIN_PROGRAMS:
        return BlocksTile(block_m, 32, 2, 1, stages)
    # Longer chunks of more bits, or of more rows with offsets, take registers that programs lack.
    if kind.bits == 4 and (block_m == 8 or (block_m == 16 and kind.name != "Q4_K")):
        return BlocksTile(block_m, 64, 4, 2, 3)
    return BlocksTile(block_m, 64, 4, 1, stages)


def count_partials(weight: torch.Tensor, rows: int, kind: str, whole_k: int = 0) -> int:
    """In how many parts `linear_blocks_partials` fills the processors with this weight; 1 on a CPU. No count
    changes a bit.

    whole_k: K of the weight of which `weight` holds neighbouring K splits, 0 if it is whole.
    """
    if weight.device.type != "cuda":
        return 1
    k = KINDS[kind].columns(weight.shape[1])
    return part_counts(k, whole_k or k)[-1]
