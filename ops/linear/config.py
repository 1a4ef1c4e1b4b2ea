"""Which tile a product runs with: a measured table per (architecture, N, K, dtype) and a rule for the rest.

The parts of K alone decide a row's bits: each is summed from zero in one order, and they are added as a tree,
((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)). They depend on the weight, never on the number of rows. The tile
follows the rows: 16 to 128 were measured to give the same bits (tests/gpu/test_linear.py checks).

A product before a norm (`linear_partials`) has `count_k_splits(K)` splits, whatever the table says, so that
any number of programs, or of GPUs that hold a piece of the weight each, may sum a subtree.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from compiled_mtp.ops.device import device_of
from compiled_mtp.ops.k_splits import K_SPLIT_UNIT, NARROW_ROWS, count_k_splits, part_counts

MAX_SIDE_BY_SIDE = 4
# The GPU that was measured, an H200; of fewer than MIN_PROGRAMS programs a tile is too large.
PROCESSORS = 132
MIN_PROGRAMS = 120
# Above NARROW_ROWS, tiles of LARGE_M_PART_ROWS weight rows and parts of K are to make LARGE_M_PROGRAMS
# programs.
LARGE_M_PART_ROWS = 80
LARGE_M_PROGRAMS = 180
# Of a thread's 255.
MAX_SUM_REGISTERS = 128
TABLE = Path(__file__).with_name("table.json")


@dataclass(frozen=True)
class LinearConfig:
    """One launch configuration.

    block_m, block_n: rows and weight rows of a tile. block_k: columns of one chain a step.
    split, chains: powers of two; K is cut into split * chains parts. `split` programs take `chains` of them
    each, side by side (one chain of tensor-core products is bound by latency), or one after the other when
    `sequential`.
    prefetch_bytes: of each weight row, sent to L2 before the previous kernel has finished.

    Where block_k is a whole part, all of a program's weights are loaded at once, before the previous kernel
    has finished; block_k may then exceed K_SPLIT_UNIT, and there may be any number of chains.
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
        """Columns of one part of K, a multiple of K_SPLIT_UNIT."""
        return -(-k // (self.split * self.chains * K_SPLIT_UNIT)) * K_SPLIT_UNIT

    def is_even(self, k: int) -> bool:
        """Whether every step of every chain is whole."""
        length = self.part_length(k)
        return k == length * self.chains * self.split and length % self.block_k == 0

    def is_one_step(self, k: int) -> bool:
        """Whether a program takes all its columns in one step, without a loop."""
        return self.block_k == self.part_length(k) and self.is_even(k) and not self.sequential

    def stage_bytes(self, x_bytes: int, weight_bytes: int) -> int:
        """Shared memory of one pipeline stage."""
        chains = 1 if self.sequential else self.chains
        return chains * self.block_k * (self.block_m * x_bytes + self.block_n * weight_bytes)


NAMED_DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "fp32": torch.float32}


def dtype_name(weight_dtype: torch.dtype) -> str:
    """The name of a weight's dtype in the table."""
    return next(name for name, dtype in NAMED_DTYPES.items() if dtype == weight_dtype)


def block_rows(rows: int) -> int:
    """Rows of a tile for `rows` rows in all."""
    return NARROW_ROWS if rows <= NARROW_ROWS else 32 if rows <= 32 else 64 if rows <= 64 else 128


@functools.cache
def read_table() -> dict[str, dict[str, list[int]]]:
    """Architecture -> "NxK dtype" -> the fields of LinearConfig from block_n to prefetch_bytes, measured."""
    table: dict[str, dict[str, list[int]]] = json.loads(TABLE.read_text())
    return table


def narrow_config(arch: str, n: int, k: int, weight_dtype: torch.dtype) -> LinearConfig:
    """The configuration of up to 16 rows; its parts of K hold for any number of rows.

    n, k: of the whole weight, here and below, also where a device holds a piece of it.
    """
    entry = read_table().get(arch, {}).get(f"{n}x{k} {dtype_name(weight_dtype)}")
    if entry is not None:
        block_n, block_k, num_warps, num_stages, split, chains, prefetch_bytes = entry
        config = LinearConfig(16, block_n, block_k, num_warps, num_stages, split, chains, prefetch_bytes)
        # More parts than there is room for side by side, unless each is one step.
        is_long = chains > MAX_SIDE_BY_SIDE and not config.is_one_step(k)
        return replace(config, sequential=True) if is_long else config
    if weight_dtype == torch.float32:
        return LinearConfig(16, 32, 32, 4, 3, 1, 4, 0)
    # As many programs as fill the processors, and parts of K long enough to stream.
    block_n = 64 if n >= 16384 else 32 if n >= 6144 else 16
    chains = 4 if k >= 2048 else 2
    split = 1
    while split < 4 and -(-n // block_n) * split < MIN_PROGRAMS and k // (2 * split * chains) >= 256:
        split *= 2
    block_k = 128 if weight_dtype == torch.float8_e4m3fn else 64
    return LinearConfig(16, block_n, block_k, 4, 4 if block_n < 64 else 3, split, chains, 512)


def fp8_tile_of_32(config: LinearConfig) -> LinearConfig:
    """FP8 tiles of 32 rows: side by side the chains would not fit in the registers."""
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
    """Tiles from 17 rows on: half a tile may then be padding, and yet gate|up of 27B takes 91 us where tiles
    of 32 rows took 132."""
    block_m = max(block_m, 64)
    # Rows, weight rows and warps of a tile, the largest first.
    tiles = [(64, 128, 4), (64, 64, 4), (64, 32, 4)]
    if is_before_norm:
        # Measured at 128 rows: of 27B's down 79 us with its norm where larger tiles in more programs took 94.
        del tiles[0]
    elif block_m == 128:
        tiles[:1] = [(128, 128, 8), (128, 64, 4)]
    # Sums that wait while a program goes through its parts one after the other, and the one that grows.
    sums = config.chains.bit_length()
    tiles = [tile for tile in tiles if sums * block_registers(*tile) <= MAX_SUM_REGISTERS]
    programs = {tile: -(-n // tile[1]) * config.split * (block_m // tile[0]) for tile in tiles}
    tile = next((tile for tile in tiles if programs[tile] >= MIN_PROGRAMS), tiles[-1])
    rows, weight_rows, num_warps = tile
    block_k = 128 if weight_dtype == torch.float8_e4m3fn else 64
    config = replace(
        config, block_m=rows, block_n=weight_rows, block_k=block_k, num_warps=num_warps, sequential=True
    )
    # As many stages as leave every program its place at once: a few that come late cost a whole round. Fewer
    # than three would not stream.
    stage = config.stage_bytes(x_dtype.itemsize, weight_dtype.itemsize)
    places = max(1, min(-(-programs[tile] // PROCESSORS), shared_bytes // (3 * stage)))
    most = 6 if rows == 64 else 4
    return replace(config, num_stages=min(most, max(3, shared_bytes // (places * stage))))


def block_registers(block_m: int, block_n: int, num_warps: int) -> int:
    """Registers of a thread for one tile of sums."""
    return block_m * block_n // (32 * num_warps)


def with_k_splits(config: LinearConfig, k_splits: int, split: int, is_fp8: bool) -> LinearConfig:
    """The configuration for `k_splits` parts in `split` programs."""
    chains = k_splits // split
    config = replace(config, split=split, chains=chains, block_k=min(config.block_k, K_SPLIT_UNIT))
    if chains == 1 or (is_fp8 and chains <= MAX_SIDE_BY_SIDE):
        return config
    # Side by side, 27B's down took 52 us where one share after the other takes 45.
    return replace(config, sequential=True)


def shared_split(arch: str, n: int, k: int, weight_dtype: torch.dtype) -> int:
    """The table's number of programs for a product before a norm; else as many as fill the processors."""
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
    pieces: int = 1,
) -> LinearConfig:
    """The configuration of tiles of `block_m` rows on an architecture ("sm_90") and its shared memory.

    With `prefill` the bits are those of other tiles of prompts, not those of decode. With `split` the product
    is one before a norm, of 1 / `pieces` of the columns, in that many programs.
    """
    config = narrow_config(arch, n, k, weight_dtype)
    if split:
        config = with_k_splits(
            config, count_k_splits(k) // pieces, split, weight_dtype == torch.float8_e4m3fn
        )
    elif prefill:
        config = replace(config, chains=1, block_k=min(config.block_k, K_SPLIT_UNIT))
    fp8 = weight_dtype == torch.float8_e4m3fn
    if x_dtype == torch.float32:
        # Float32 products run on the plain units, where registers and not memory are scarce.
        config = replace(config, block_n=32, block_k=128 if fp8 else 32, num_warps=4, sequential=True)
    elif fp8 and block_m == 32:
        config = fp8_tile_of_32(config)
    elif fp8 and block_m > 16 and not prefill:
        # Two warps keep Triton from the warp-group products: with converted weights those take the columns in
        # another order, and rows would differ from those of narrow tiles.
        config = replace(config, block_m=64, block_n=32, num_warps=2, num_stages=3, sequential=True)
    elif block_m > 16:
        config = large_m_tile(config, n, block_m, x_dtype, weight_dtype, shared_bytes, split > 0)
    stage = config.stage_bytes(x_dtype.itemsize, weight_dtype.itemsize)
    stages = max(2, min(config.num_stages, (shared_bytes - 4096) // stage))
    return replace(config, num_stages=stages)


def whole_size(weight: torch.Tensor, whole_n: int, whole_k: int) -> tuple[int, int]:
    """N and K of the weight of which `weight` is a piece; zero stands for its own."""
    return whole_n or weight.shape[0], whole_k or weight.shape[1]


def is_sum(weight: torch.Tensor, count: int, whole_k: int) -> bool:
    """Whether `count` parts are the whole sum, which is rounded: a piece of the columns gives a part."""
    return count == 1 and (whole_k or weight.shape[1]) == weight.shape[1]


def choose(
    x: torch.Tensor,
    weight: torch.Tensor,
    whole: tuple[int, int],
    is_prefill: bool,
    split: int = 0,
) -> LinearConfig:
    """The configuration of a product on x's device; `is_prefill`: with FP8 weights, of a prompt's rows.

    whole: N and K of the weight of which `weight` is a piece, zeros if it is whole. split: as for
    `linear_config`.
    """
    # Warp-group products from the first row on: narrower tiles take the columns in another order.
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
    """In how many parts `linear_partials` is fastest with so many rows; 1 on a CPU. No count changes a bit.

    A piece of the columns has as many as the whole weight, as far as it has shares: as many programs, each of
    less work. With the whole's number in proportion fewer would share the memory's speed.
    """
    if weight.device.type != "cuda":
        return 1
    device = device_of(weight.device.index)
    n, k = whole_size(weight, whole_n, whole_k)
    split = shared_split(device.arch, n, k, weight.dtype)
    if rows > NARROW_ROWS:
        k_splits = count_k_splits(k)
        # Measured with 27B's out: 128 rows in one part, two, four and eight take 54, 34, 31 and 35 us.
        while split < k_splits and -(-n // LARGE_M_PART_ROWS) * split < LARGE_M_PROGRAMS:
            split *= 2
    return min(split, part_counts(weight.shape[1], k)[-1])
