"""Chooses a product's tile: from a measured table per (architecture, N, K, dtype), else by a rule.

The K splits alone decide a row's bits: each is summed from zero in one order, and they are added as a tree,
((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)). They depend on the weight, never on the number of rows. The tile
depends on the rows: tiles of 16 to 128 rows give the same bits (tests/gpu/test_linear.py checks).

A product before a norm (`linear_partials`) has `count_k_splits(K)` K splits, whatever the table says: any
number of programs, or of GPUs with a weight shard each, may then sum a subtree.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from compiled_mtp.ops.device import device_of
from compiled_mtp.ops.k_splits import K_SPLIT_UNIT, NARROW_ROWS, WIDE_ROWS, count_k_splits, part_counts
from compiled_mtp.ops.persistent_config import WIDE_PARTS, has_few_parts

# The most chains that a program sums at the same time.
MAX_SIDE_BY_SIDE = 4
# Processors of an H200, on which the table was measured. A tile that gives fewer than MIN_PROGRAMS programs
# is too large.
PROCESSORS = 132
MIN_PROGRAMS = 120
# Above NARROW_ROWS, divide K until tiles of LARGE_M_PART_ROWS weight rows give LARGE_M_PROGRAMS programs.
LARGE_M_PART_ROWS = 80
LARGE_M_PROGRAMS = 180
# Registers for sums, of a thread's 255.
MAX_SUM_REGISTERS = 128
TABLE = Path(__file__).with_name("table.json")


@dataclass(frozen=True)
class LinearConfig:
    """One launch configuration.

    block_m, block_n: rows and weight rows of a tile. block_k: columns per step of one chain.
    split, chains: powers of two; K is cut into split * chains K splits. Each of `split` programs sums
    `chains` of them, a chain each: at the same time, because one chain of tensor-core products is bound by
    latency, or one after another if `sequential`.
    prefetch_bytes: bytes of each weight row that a program sends to L2 before the previous kernel ends.

    If block_k is a whole K split, a program loads all its weights at once, before the previous kernel ends;
    block_k may then exceed K_SPLIT_UNIT, and there may be any number of chains.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    split: int
    chains: int
    prefetch_bytes: int
    sequential: bool = False

    def part_length(self, k: int) -> int:
        """Return the columns of one K split, a multiple of K_SPLIT_UNIT."""
        return -(-k // (self.split * self.chains * K_SPLIT_UNIT)) * K_SPLIT_UNIT

    def is_even(self, k: int) -> bool:
        """Return whether every step of every chain is whole."""
        length = self.part_length(k)
        return k == length * self.chains * self.split and length % self.block_k == 0

    def is_one_step(self, k: int) -> bool:
        """Return whether a program takes all its columns in one step, without a loop."""
        return self.block_k == self.part_length(k) and self.is_even(k) and not self.sequential

    def stage_bytes(self, x_bytes: int, weight_bytes: int) -> int:
        """Return the bytes of shared memory of one pipeline stage."""
        chains = 1 if self.sequential else self.chains
        return chains * self.block_k * (self.block_m * x_bytes + self.block_n * weight_bytes)


NAMED_DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "fp32": torch.float32}


def dtype_name(weight_dtype: torch.dtype) -> str:
    """Return the name of a weight's dtype in the table."""
    return next(name for name, dtype in NAMED_DTYPES.items() if dtype == weight_dtype)


def block_rows(rows: int) -> int:
    """Return the rows of a tile for a product of `rows` rows."""
    return NARROW_ROWS if rows <= NARROW_ROWS else 32 if rows <= 32 else 64 if rows <= 64 else 128


@functools.cache
def read_table() -> dict[str, dict[str, list[int]]]:
    """Return architecture -> "NxK dtype" -> the measured LinearConfig fields block_n to prefetch_bytes."""
    table: dict[str, dict[str, list[int]]] = json.loads(TABLE.read_text())
    return table


def narrow_config(arch: str, n: int, k: int, weight_dtype: torch.dtype) -> LinearConfig:
    """Return the configuration for up to 16 rows; its K splits hold for any number of rows.

    n, k: N and K of the whole weight, here and below, even if a device holds only a shard.
    """
    entry = read_table().get(arch, {}).get(f"{n}x{k} {dtype_name(weight_dtype)}")
    if entry is not None:
        block_n, block_k, num_warps, num_stages, split, chains, prefetch_bytes = entry
        config = LinearConfig(16, block_n, block_k, num_warps, num_stages, split, chains, prefetch_bytes)
        # More chains than registers can hold at the same time, unless each is one step.
        is_long = chains > MAX_SIDE_BY_SIDE and not config.is_one_step(k)
        return replace(config, sequential=True) if is_long else config
    if weight_dtype == torch.float32:
        return LinearConfig(16, 32, 32, 4, 3, 1, 4, 0)
    # Split K until the programs fill the processors, but keep K splits long enough to stream.
    block_n = 64 if n >= 16384 else 32 if n >= 6144 else 16
    chains = 4 if k >= 2048 else 2
    split = 1
    while split < 4 and -(-n // block_n) * split < MIN_PROGRAMS and k // (2 * split * chains) >= 256:
        split *= 2
    block_k = 128 if weight_dtype == torch.float8_e4m3fn else 64
    return LinearConfig(16, block_n, block_k, 4, 4 if block_n < 64 else 3, split, chains, 512)


def fp8_tile_of_32(config: LinearConfig) -> LinearConfig:
    """Return a configuration with FP8 tiles of 32 rows: sequential, so that the chains fit in registers."""
    block_k = min(config.block_k, K_SPLIT_UNIT)
    return replace(config, block_m=32, block_k=block_k, sequential=True, num_stages=4)


def large_m_tile(
    config: LinearConfig,
    n: int,
    block_m: int,
    x_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    shared_bytes: int,
    is_before_norm: bool,
) -> LinearConfig:
    """Return the configuration from 17 rows on."""
    # Half of a tile of 64 rows may be padding, but it is faster than tiles of 32 rows: gate|up of 27B takes
    # 91 us instead of 132.
    block_m = max(block_m, 64)
    # Rows, weight rows and warps of a tile, largest first.
    tiles = [(64, 128, 4), (64, 64, 4), (64, 32, 4)]
    if is_before_norm:
        # Measured with 27B's down and its norm at 128 rows: 79 us, with larger tiles in more programs 94.
        del tiles[0]
    elif block_m == 128:
        tiles[:1] = [(128, 128, 8), (128, 64, 4)]
    # Accumulators of a program that sums its chains one after another: one that grows, and the tree's nodes
    # that wait for their right half.
    sums = config.chains.bit_length()
    tiles = [tile for tile in tiles if sums * block_registers(*tile) <= MAX_SUM_REGISTERS]
    programs = {tile: -(-n // tile[1]) * config.split * (block_m // tile[0]) for tile in tiles}
    tile = next((tile for tile in tiles if programs[tile] >= MIN_PROGRAMS), tiles[-1])
    rows, weight_rows, num_warps = tile
    block_k = 128 if weight_dtype == torch.float8_e4m3fn else 64
    config = replace(
        config, block_m=rows, block_n=weight_rows, block_k=block_k, num_warps=num_warps, sequential=True
    )
    # The most stages with which all programs run at the same time: a few late programs would take as long as
    # all others. Fewer than three stages would not stream.
    stage = config.stage_bytes(x_dtype.itemsize, weight_dtype.itemsize)
    places = max(1, min(-(-programs[tile] // PROCESSORS), shared_bytes // (3 * stage)))
    most = 6 if rows == 64 else 4
    return replace(config, num_stages=min(most, max(3, shared_bytes // (places * stage))))


def block_registers(block_m: int, block_n: int, num_warps: int) -> int:
    """Return the registers per thread for one tile of sums."""
    return block_m * block_n // (32 * num_warps)


def with_k_splits(config: LinearConfig, k_splits: int, split: int, is_fp8: bool) -> LinearConfig:
    """Return the configuration for `k_splits` K splits in `split` programs."""
    chains = k_splits // split
    config = replace(config, split=split, chains=chains, block_k=min(config.block_k, K_SPLIT_UNIT))
    if chains == 1 or (is_fp8 and chains <= MAX_SIDE_BY_SIDE):
        return config
    # 27B's down takes 45 us with the chains one after another, 52 us with all at the same time.
    return replace(config, sequential=True)


def shared_split(arch: str, n: int, k: int, weight_dtype: torch.dtype) -> int:
    """Return how many programs share K before a norm: the table's number, or enough to fill a GPU."""
    config, k_splits = narrow_config(arch, n, k, weight_dtype), count_k_splits(k)
    if config.split * config.chains == k_splits:
        return config.split
    split = 1
    while split < k_splits and -(-n // config.block_n) * split < MIN_PROGRAMS:
        split *= 2
    return split


@functools.lru_cache(maxsize=4096)
def linear_config(
    arch: str,
    shared_bytes: int,
    n: int,
    k: int,
    x_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    block_m: int,
    prefill: bool,
    split: int = 0,
    shards: int = 1,
) -> LinearConfig:
    """Return the configuration of tiles of `block_m` rows, for an architecture ("sm_90") and shared memory.

    prefill: give the bits of a prompt's rows, which may differ from those of decode. split: if not 0, the
    product comes before a norm, and this number of programs share its columns: 1 / `shards` of the weight's.
    """
    config = narrow_config(arch, n, k, weight_dtype)
    if split:
        config = with_k_splits(
            config, count_k_splits(k) // shards, split, weight_dtype == torch.float8_e4m3fn
        )
    elif prefill:
        config = replace(config, chains=1, block_k=min(config.block_k, K_SPLIT_UNIT))
    fp8 = weight_dtype == torch.float8_e4m3fn
    if x_dtype == torch.float32:
        # Float32 products run on the plain units, where registers are scarce rather than shared memory.
        config = replace(config, block_n=32, block_k=128 if fp8 else 32, num_warps=4, sequential=True)
    elif fp8 and block_m == 32:
        config = fp8_tile_of_32(config)
    elif fp8 and block_m > 16 and not prefill:
        # With two warps Triton does not use warp-group products: with converted weights these add the columns
        # in another order, and rows would differ from those of narrow tiles.
        config = replace(config, block_m=64, block_n=32, num_warps=2, num_stages=3, sequential=True)
    elif block_m > 16:
        config = large_m_tile(config, n, block_m, x_dtype, weight_dtype, shared_bytes, split > 0)
    stage = config.stage_bytes(x_dtype.itemsize, weight_dtype.itemsize)
    stages = max(2, min(config.num_stages, (shared_bytes - 4096) // stage))
    return replace(config, num_stages=stages)


def whole_size(weight: torch.Tensor, whole_n: int, whole_k: int) -> tuple[int, int]:
    """Return N and K of the whole weight of the shard `weight`; whole_n, whole_k: 0 if not cut there."""
    return whole_n or weight.shape[0], whole_k or weight.shape[1]


def choose(
    x: torch.Tensor,
    weight: torch.Tensor,
    whole: tuple[int, int],
    is_prefill: bool,
    split: int = 0,
) -> LinearConfig:
    """Return the configuration of a product on x's device.

    whole: N and K of the whole weight if `weight` is a shard, else zeros. is_prefill: x has a prompt's rows
    and the weight is FP8. split: as for `linear_config`.
    """
    # Use warp-group products for any number of a prompt's rows: narrower tiles add columns in another order.
    block_m = max(64, block_rows(x.shape[0])) if is_prefill else block_rows(x.shape[0])
    device = device_of(x.device.index)
    n, k = whole_size(weight, *whole)
    return linear_config(
        device.arch,
        device.shared_bytes,
        n,
        k,
        x.dtype,
        weight.dtype,
        block_m,
        is_prefill,
        split,
        k // weight.shape[1],
    )


def count_partials(weight: torch.Tensor, rows: int, whole_n: int = 0, whole_k: int = 0) -> int:
    """Return how many partials make `linear_partials` fastest with `rows` rows; 1 on a CPU.

    The count changes no bit. A shard of the columns has as many partials as the whole weight, at most one per
    K split: fewer programs would not use the full speed of memory. With more than WIDE_ROWS rows, persistent
    programs sum a large whole weight in WIDE_PARTS.
    """
    if weight.device.type != "cuda":
        return 1
    device = device_of(weight.device.index)
    n, k = whole_size(weight, whole_n, whole_k)
    split = shared_split(device.arch, n, k, weight.dtype)
    is_whole = weight.shape == (n, k) and weight.dtype is torch.bfloat16
    if rows > WIDE_ROWS and is_whole and count_k_splits(k) > 1 and has_few_parts(device, n, k):
        return WIDE_PARTS
    if rows > NARROW_ROWS:
        k_splits = count_k_splits(k)
        # Measured with 27B's out: 128 rows take 54, 34, 31 and 35 us with one, two, four and eight partials.
        while split < k_splits and -(-n // LARGE_M_PART_ROWS) * split < LARGE_M_PROGRAMS:
            split *= 2
    return min(split, part_counts(weight.shape[1], k)[-1])
