"""Which tile a product runs with: a measured table per (architecture, N, K, dtype) and a rule for the rest.

`split` alone decides a row's bits, and it depends on the weight, never on the number of rows. The tile
follows the rows: 16 to 128 were measured to give the same bits (tests/gpu/test_linear.py checks).
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch

SPLIT_UNIT = 256  # every block_k divides it, so that a split ends where a tile does
TABLE = Path(__file__).with_name("table.json")


@dataclass(frozen=True)
class LinearConfig:
    """One launch configuration.

    block_m, block_n: rows and weight rows of a tile. block_k: columns a step. split: parts of K, summed in
    order. prefetch_bytes: of each weight row, sent to L2 before the previous kernel has finished.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    split: int
    prefetch_bytes: int

    def split_length(self, k: int) -> int:
        """Columns of one part of K, a multiple of SPLIT_UNIT."""
        return -(-k // (self.split * SPLIT_UNIT)) * SPLIT_UNIT

    def stage_bytes(self, x_bytes: int, weight_bytes: int) -> int:
        """Shared memory of one pipeline stage."""
        return self.block_k * (self.block_m * x_bytes + self.block_n * weight_bytes)


def dtype_name(weight_dtype: torch.dtype) -> str:
    """The name of a weight's dtype in the table."""
    return {torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8", torch.float32: "fp32"}[weight_dtype]


def block_rows(rows: int) -> int:
    """Rows of a tile for `rows` rows in all."""
    return 16 if rows <= 16 else 32 if rows <= 32 else 64 if rows <= 64 else 128


@functools.cache
def read_table() -> dict[str, dict[str, list[int]]]:
    """Architecture -> "NxK dtype" -> [block_n, block_k, warps, stages, split, prefetch_bytes], measured."""
    table: dict[str, dict[str, list[int]]] = json.loads(TABLE.read_text())
    return table


def narrow_config(arch: str, n: int, k: int, weight_dtype: torch.dtype) -> LinearConfig:
    """The configuration of up to 16 rows; its `split` holds for any number of rows."""
    name = dtype_name(weight_dtype)
    entry = read_table().get(arch, {}).get(f"{n}x{k} {name}")
    if entry is not None:
        return LinearConfig(16, *entry)
    if weight_dtype == torch.float32:
        return LinearConfig(16, 32, 32, 4, 3, 1, 0)
    # As many programs as fill the processors, each with long rows in flight.
    block_n = 64 if n >= 8192 else 32 if n >= 4096 else 16
    block_k = 256 if block_n < 64 and weight_dtype == torch.bfloat16 else 128
    split = 1
    while split < 8 and -(-n // block_n) * split < 120 and k // (2 * split) >= 512:
        split *= 2
    return LinearConfig(16, block_n, block_k, 4, 4, split, 512)


@functools.lru_cache(maxsize=4096)
def linear_config(
    arch: str,
    shared_bytes: int,
    n: int,
    k: int,
    x_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    block_m: int,
) -> LinearConfig:
    """The configuration of tiles of `block_m` rows on an architecture ("sm_90") and its shared memory."""
    config = narrow_config(arch, n, k, weight_dtype)
    if x_dtype == torch.float32:
        # Float32 products run on the plain units, where registers and not memory are scarce.
        config = replace(
            config, block_n=32, block_k=32 if weight_dtype == torch.float32 else 128, num_warps=4
        )
    elif block_m == 128:
        block_k = 128 if weight_dtype == torch.float8_e4m3fn else 64
        tiles = ((128, 128, 8), (128, 64, 4), (64, 64, 4), (64, 32, 4))
        block_m, block_n, warps = next(
            (tile for tile in tiles if -(-n // tile[1]) * (128 // tile[0]) * config.split >= 120), tiles[-1]
        )
        config = replace(
            config, block_m=block_m, block_n=block_n, block_k=block_k, num_warps=warps, num_stages=4
        )
    else:
        config = replace(config, block_m=block_m)
    stage = config.stage_bytes(x_dtype.itemsize, weight_dtype.itemsize)
    stages = max(2, min(config.num_stages, (shared_bytes - 4096) // stage))
    return replace(config, num_stages=stages)
