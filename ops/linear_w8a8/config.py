"""Which tile an FP8 product has, and how many programs split one before a norm. Neither decides a bit."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from compiled_mtp.ops.device import device_of
from compiled_mtp.ops.k_splits import WIDE_ROWS, is_sum, part_counts
from compiled_mtp.ops.persistent_config import WIDE_PARTS, has_few_parts

# Of an H200, and how many programs should at least have a place there; with up to 16 rows fewer do.
PROCESSORS = 132
MIN_PROGRAMS = 120
MIN_FEW_ROWS = 80
# So many rows take the least time with the weight on the left, by and large.
NARROW_ROWS = 16


@dataclass(frozen=True)
class W8A8Config:
    """Rows and weight rows of a tile, its warps, stages of its pipeline, and bytes of a weight row sent to L2
    before the previous kernel has finished."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    prefetch_bytes: int = 512


def configuration(rows: int, n: int, split: int, k_splits: int) -> W8A8Config:
    """Tiles for `rows` rows where `split` programs sum `k_splits` shares each: measured on an H200 at 27B's
    sizes with 4 and 128 rows."""
    programs = -(-n // 128) * split
    if rows <= 16 and programs >= MIN_FEW_ROWS:
        # The more of a weight is on its way, the better; a second program on a processor brings its own.
        return W8A8Config(16, 128, 4, 8 if split == 1 and programs <= PROCESSORS else 6)
    if rows <= 32:
        return W8A8Config(16 if rows <= 16 else 32, 128 if programs >= MIN_PROGRAMS else 64, 4, 4)
    if rows <= 64:
        return W8A8Config(64, 128, 8, 4)
    # Narrow, since a thread loads a factor for each row that it holds sums of.
    return W8A8Config(128, 64, 4, 6) if k_splits <= 2 else W8A8Config(64, 64, 8, 4)


def count_partials(weight: torch.Tensor, rows: int, whole_k: int = 0) -> int:
    """In how many parts `linear_w8a8_partials` fills the processors with this weight and so many rows; 1 on a
    CPU. No count changes a bit.

    whole_k: K of the weight of which `weight` holds neighbouring K splits, 0 if it is whole.
    """
    if weight.device.type != "cuda":
        return 1
    n, k = weight.shape
    counts = part_counts(k, whole_k or k)
    is_whole = whole_k in (0, k) and WIDE_PARTS in counts
    if rows > WIDE_ROWS and is_whole and has_few_parts(device_of(weight.device.index), n, k):
        return WIDE_PARTS
    # Measured with 27B's down and its norm: at 4 rows two parts take 28.0 us and four 30.6, at 128 rows 55.2
    # and 45.7.
    width = 64 if rows <= NARROW_ROWS else 160
    return next((count for count in counts if -(-n // width) * count >= MIN_PROGRAMS), counts[-1])


def parts_dtype(weight: torch.Tensor, count: int, whole_k: int, out_float32: bool) -> torch.dtype:
    """bfloat16 of a whole weight's sum, float32 of parts of it; a shard of the weight may give one."""
    is_rounded = not out_float32 and is_sum(weight.shape[1], count, whole_k)
    return torch.bfloat16 if is_rounded else torch.float32
