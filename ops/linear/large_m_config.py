"""Chooses the tile of a large-M product, and which products `large_m_kernel` computes.

The tile is that of a measured table (large_m.json), else a rule's. Neither changes a bit: the K splits are
those of config.py, and both kernels sum each split in one order (tests/gpu/test_linear.py compares them).
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
from compiled_mtp.ops.k_splits import K_SPLIT_UNIT
from compiled_mtp.ops.linear.config import PROCESSORS, LinearConfig

LARGE_M_TABLE = Path(__file__).with_name("large_m.json")
# The architecture on which the bits of both kernels were compared.
ARCH = "sm_90"
MIN_ROWS = 17
# The most registers of a thread for sums, if no sum, one or more sums wait in the tree while one grows. The
# rest of the tile needs the others, and a tree needs more of them.
MOST_SUM_REGISTERS = (190, 160, 150)
OTHER_REGISTERS = 40
PREFETCH_BYTES = 512
# Weight rows, or pairs if gated, of a tile's second part. 8 is for pairs only: Triton compiles 8 rows to a
# product of another kind.
RESTS = (0, 8, 16, 32, 64)
LEAST_REST_ROWS = 16


@dataclass(frozen=True)
class LargeMTile:
    """A tile of a large-M product.

    block_m: rows. block_n, rest_n: weight rows, or pairs if gated, of the tile's two parts; rest_n may be 0.
    block_k: columns of a step. num_stages: stages of the pipeline. prefetch_bytes: bytes of each weight row
    sent to L2 before the previous kernel ends. specialized: other warps load the tiles (with four warps
    only). apart: each chain has its own loop; products overlap in it, but its pipeline fills anew.
    """

    block_m: int
    block_n: int
    rest_n: int
    block_k: int
    num_warps: int
    num_stages: int
    prefetch_bytes: int = PREFETCH_BYTES
    specialized: bool = False
    apart: bool = False


@dataclass(frozen=True)
class LargeMProduct:
    """A product as one device computes it.

    n, k: N and K of its weight shard. split: how many programs share K. chains: how many chains each of them
    sums. gated: the halves of N are gate and up. keep_partials: a norm adds the partials.
    """

    n: int
    k: int
    split: int
    chains: int
    gated: bool = False
    keep_partials: bool = False

    @property
    def width(self) -> int:
        """Return the columns of the result."""
        return self.n // 2 if self.gated else self.n

    @property
    def is_even(self) -> bool:
        """Return whether chains are whole steps, and no program waits for another's partials."""
        is_whole = self.k % (self.split * self.chains * K_SPLIT_UNIT) == 0
        return is_whole and (self.keep_partials or self.split == 1)

    @property
    def name(self) -> str:
        """Return its name in the table."""
        kind = "gated" if self.gated else f"parts{self.split}" if self.keep_partials else "product"
        return f"{self.n}x{self.k} {kind}"


def row_class(rows: int) -> int:
    """Return the row class that chooses the tile: 64, 128, or 256 for all above."""
    return 64 if rows <= 64 else 128 if rows <= 128 else 256


@functools.cache
def read_large_m_table() -> dict[str, dict[str, list[Any] | None]]:
    """Return product name -> row class -> measured LargeMTile fields; None if `linear_kernel` is faster."""
    table: dict[str, dict[str, list[Any] | None]] = json.loads(LARGE_M_TABLE.read_text())
    return table


def ranked_tiles(product: LargeMProduct, rows: int, shared_bytes: int) -> list[tuple[float, LargeMTile]]:
    """Return (cost, tile) of the tiles that fit, cheapest first; 1 is the cost of reading the weight once.

    The cost counts idle processors in the last round of programs, and each program's loads of the rows.
    """
    block_m, row_tiles = (64, 1) if rows <= 64 else (128, -(-rows // 128))
    pieces = 2 if product.gated else 1
    ranked: list[tuple[float, LargeMTile]] = []
    for warps, places, first, rest in itertools.product((4, 8), (1, 2), (32, 64, 128, 256), RESTS):
        columns = (first + rest) * pieces
        # One sum grows, the others wait for the right half of their node in the tree.
        levels = product.chains.bit_length()
        sums = block_m * columns // (32 * warps) * levels
        most = min(MOST_SUM_REGISTERS[min(levels, 3) - 1], 65536 // (32 * warps * places) - OTHER_REGISTERS)
        stages = min(6, (shared_bytes // places - 2048) // (128 * (block_m + columns)))
        if rest >= first or 0 < rest * pieces < LEAST_REST_ROWS or sums > most or stages < 3:
            continue
        programs = row_tiles * -(-product.width // (first + rest)) * product.split
        rounds = -(-programs // (PROCESSORS * places))
        waste = rounds * PROCESSORS * places * (first + rest) / (product.width * product.split * row_tiles)
        tile = LargeMTile(block_m, first, rest, 64, warps, stages)
        ranked.append((waste * (1 + block_m / columns), tile))
    return sorted(ranked, key=lambda pair: pair[0])


@functools.lru_cache(maxsize=4096)
def choose_tile(product: LargeMProduct, rows: int, shared_bytes: int) -> LargeMTile | None:
    """Return the tile of a row class, None if `linear_kernel` is faster or no tile fits."""
    measured = read_large_m_table().get(product.name, {})
    if str(rows) in measured:
        fields = measured[str(rows)]
        return None if fields is None else LargeMTile(*fields)
    ranked = ranked_tiles(product, rows, shared_bytes)
    return ranked[0][1] if ranked else None


def find_large_m(
    device: Device,
    x: torch.Tensor,
    weight: torch.Tensor,
    config: LinearConfig,
    gated: bool = False,
    keep_partials: bool = False,
) -> tuple[LargeMTile, LargeMProduct] | None:
    """Return tile and product of at least MIN_ROWS bfloat16 rows, or None if `linear_kernel` must compute it.

    `linear_kernel` computes it with another dtype, on a GPU other than `ARCH` and in the interpreter, if rows
    of x or weight do not begin at multiples of 16 bytes, if chains are not whole steps, and if programs wait
    for one another's partials.
    """
    rows, (n, k) = x.shape[0], weight.shape
    if rows < MIN_ROWS or n == 0 or not device.has_copy_engine or device.arch != ARCH:
        return None
    if x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        return None
    product = LargeMProduct(n, k, config.split, config.chains, gated, keep_partials)
    if not (product.is_even and is_describable(x) and is_describable(weight)):
        return None
    tile = choose_tile(product, row_class(rows), device.shared_bytes)
    return None if tile is None else (tile, product)
