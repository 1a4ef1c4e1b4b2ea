"""Which tile an FP8 product has, and how many programs split one before a norm. Neither decides a bit."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from compiled_mtp.ops.shares import part_counts

MIN_PROGRAMS = 120  # of an H200's 132 processors


@dataclass(frozen=True)
class W8A8Config:
    """Rows and weight rows of a tile, its warps, stages of its pipeline, and bytes of a weight row sent to L2
    before the previous kernel has finished."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    prefetch_bytes: int = 512


def configuration(rows: int, n: int, split: int, shares: int) -> W8A8Config:
    """Tiles for `rows` rows where `split` programs sum `shares` shares each: the fewest instructions a byte
    that leave the processors programs enough, and the sums that wait registers enough."""
    if rows <= 32:
        block_m = 16 if rows <= 16 else 32
        block_n = 128 if -(-n // 128) * split >= MIN_PROGRAMS else 64
        return W8A8Config(block_m, block_n, 4, 4)
    if rows <= 64 or shares == 2:
        return W8A8Config(64, 128, 8, 4)
    return W8A8Config(128, 128, 8, 4) if shares == 1 else W8A8Config(64, 64, 8, 4)


def count_parts(weight: torch.Tensor, whole_k: int = 0) -> int:
    """In how many parts `linear_w8a8_parts` fills the processors with this weight; 1 on a CPU.

    whole_k: K of the weight of which `weight` holds neighbouring shares of the columns, 0 if it is whole.
    """
    if weight.device.type != "cuda":
        return 1
    n, k = weight.shape
    counts = part_counts(k, whole_k or k)
    return next((count for count in counts if -(-n // 64) * count >= MIN_PROGRAMS), counts[-1])


def parts_dtype(weight: torch.Tensor, count: int, whole_k: int, out_float32: bool) -> torch.dtype:
    """bfloat16 of a whole weight's sum, float32 of parts of it; a piece of the weight may give one."""
    is_sum = count == 1 and (whole_k or weight.shape[1]) == weight.shape[1]
    return torch.bfloat16 if is_sum and not out_float32 else torch.float32
