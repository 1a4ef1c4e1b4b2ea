"""Which tile an FP8 product has where the copy engine brings weight and rows, and where it does.

A measured table (large_m.json) and a rule for the rest. Neither decides a bit.
"""

from __future__ import annotations

import functools
import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from compiled_mtp.ops.descriptors import is_describable
from compiled_mtp.ops.device import Device
from compiled_mtp.ops.linear_w8a8.config import NARROW_ROWS, PROCESSORS

LARGE_M_TABLE = Path(__file__).with_name("large_m.json")
# The generation on which rows of both kernels were compared.
ARCH = "sm_90"
# Of a thread: its sums and one product, beside what else it needs; where one sum grows, and where more wait.
MOST_REGISTERS = (184, 192)
OTHER_REGISTERS = 40
MAX_STAGES = 8


@dataclass(frozen=True)
class LargeMTile:
    """Rows of a tile, weight rows of a block, its blocks, weight rows of its last, smaller block (or 0).

    Then warps, stages of the pipeline, and bytes of a weight row sent to L2 before the previous kernel ends.
    """

    block_m: int
    block_n: int
    count: int
    rest_n: int
    num_warps: int
    num_stages: int
    prefetch_bytes: int = 512

    @property
    def width(self) -> int:
        """Weight rows of a program."""
        return self.block_n * self.count + self.rest_n


def row_class(rows: int) -> int:
    """The most rows of those that share a tile: 16, 64, 128, 256, or 2,048, which stands for any more."""
    return next((most for most in (NARROW_ROWS, 64, 128, 256) if rows <= most), 2048)


def product_name(n: int, k: int, count: int, split_length: int) -> str:
    """The table's name of a product of a shard [n, k] of the weight, or of one before a norm in partials."""
    return f"{n}x{k} " + ("product" if split_length == k else f"parts{count}")


@functools.cache
def read_large_m_table() -> dict[str, dict[str, list[Any] | None]]:
    """Name of a product -> row class -> the fields of LargeMTile in order, as measured, or None where
    `linear_w8a8_kernel` was faster."""
    table: dict[str, dict[str, list[Any] | None]] = json.loads(LARGE_M_TABLE.read_text())
    return table


def ranked_tiles(
    n: int, k_splits: int, split: int, rows: int, shared_bytes: int, places: int = 1
) -> list[LargeMTile]:
    """Tiles that fit where each of `split` programs sums `k_splits` K splits, and a processor has `places`
    programs: those first that waste least of the last round of programs and of reading rows again."""
    block_m, row_tiles = (64, 1) if rows <= 64 else (128, -(-rows // 128))
    ranked = []
    for warps, first, count, rest in itertools.product((8, 4), (64, 128), (1, 2, 3, 4), (0, 16, 32, 64)):
        width, threads = first * count + rest, 32 * warps
        levels = k_splits.bit_length()
        sums = block_m * width // threads * levels + block_m * first // threads
        most = min(MOST_REGISTERS[min(levels, 2) - 1], 65536 // (threads * places) - OTHER_REGISTERS)
        stage = 128 * (block_m + width) + 4 * block_m + 128 * (count + 1)
        # Triton 3.9 gives results on their way out room of their own where K splits are added up.
        out_bytes = 4 * block_m * first if k_splits > 1 else 0
        stages = min(MAX_STAGES, (shared_bytes // places - 2048 - out_bytes) // stage)
        if sums > most or stages < 3:
            continue
        programs = row_tiles * -(-n // width) * split
        rounds = -(-programs // (PROCESSORS * places))
        waste = rounds * PROCESSORS * places * width / (n * split * row_tiles)
        # Of a tile of 64 rows most may be padding, which costs no bytes.
        cost = waste * (1 + min(rows, block_m) / width)
        ranked.append((round(cost, 3), count, LargeMTile(block_m, first, count, rest, warps, stages)))
    return [tile for _, _, tile in sorted(ranked, key=lambda entry: entry[:2])]


@functools.lru_cache(maxsize=4096)
def choose_tile(
    n: int, k: int, count: int, split_length: int, rows: int, shared_bytes: int
) -> LargeMTile | None:
    """The tile of a row class, None where `linear_w8a8_kernel` is faster or no tile fits."""
    measured = read_large_m_table().get(product_name(n, k, count, split_length), {})
    if str(rows) in measured:
        fields = measured[str(rows)]
        return None if fields is None else LargeMTile(*fields)
    if rows <= NARROW_ROWS:
        return None
    ranked = ranked_tiles(n, k // (split_length * count), count, rows, shared_bytes)
    return ranked[0] if ranked else None


def find_large_m(
    device: Device, x: torch.Tensor, weight: torch.Tensor, count: int, split_length: int
) -> LargeMTile | None:
    """The tile of a product of many rows, or of few where that was measured to be faster, or None where
    `linear_w8a8_kernel` has to do it: on another GPU than Hopper, in the interpreter, and with rows of either
    that do not lie at multiples of 16 bytes."""
    rows, (n, k) = x.shape[0], weight.shape
    if rows == 0 or n == 0 or not device.has_copy_engine or device.arch != ARCH:
        return None
    if not (is_describable(x) and is_describable(weight)):
        return None
    return choose_tile(n, k, count, split_length, row_class(rows), device.shared_bytes)
