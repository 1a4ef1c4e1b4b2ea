"""Which tile a product of many rows has where the copy engine brings the weight, and where it does.

A measured table (large_m.json) and a rule for the rest. Neither decides a bit: the parts of K are those of
config.py, and both kernels add each up in one order (tests/gpu/test_linear.py compares them).
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
# The generation on which rows of both kernels were compared.
ARCH = "sm_90"
MIN_ROWS = 17
# Of a thread, where one sum grows alone, where one waits for it, and where more do; what else a tile needs
# takes the rest, and a tree's more.
MOST_SUM_REGISTERS = (190, 160, 150)
OTHER_REGISTERS = 40
PREFETCH_BYTES = 512
# Weight rows, or pairs, of the second piece. Of 8 rows Triton makes a product of another class: 8 are pairs.
RESTS = (0, 8, 16, 32, 64)
LEAST_REST_ROWS = 16


@dataclass(frozen=True)
class LargeMTile:
    """Rows of a tile, its weight rows in two pieces (pairs of rows where gated; the second may be 0), columns
    of a step, warps, stages of the pipeline, bytes of a weight row sent to L2 before the previous kernel has
    finished, whether other warps fetch (of four warps only), and whether each chain has a loop of its own, in
    which products overlap, and a pipeline that fills anew."""

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
    """A product as one device has it: N and K of its piece of the weight, in how many programs K is cut and
    how many chains each of them sums, whether the halves of N are gate and up, and whether a norm adds the
    parts up."""

    n: int
    k: int
    split: int
    chains: int
    gated: bool = False
    keep_partials: bool = False

    @property
    def width(self) -> int:
        """Columns of the result."""
        return self.n // 2 if self.gated else self.n

    @property
    def is_even(self) -> bool:
        """Whether chains are whole steps, and programs need not wait for one another."""
        is_whole = self.k % (self.split * self.chains * K_SPLIT_UNIT) == 0
        return is_whole and (self.keep_partials or self.split == 1)

    @property
    def name(self) -> str:
        """Its name in the table."""
        kind = "gated" if self.gated else f"parts{self.split}" if self.keep_partials else "product"
        return f"{self.n}x{self.k} {kind}"


def row_class(rows: int) -> int:
    """The most rows of those that share a tile: 64, 128, or 256, which stands for any more."""
    return 64 if rows <= 64 else 128 if rows <= 128 else 256


@functools.cache
def read_large_m_table() -> dict[str, dict[str, list[Any] | None]]:
    """Name of a product -> row class -> the fields of LargeMTile in order, as measured, or None where
    `linear_kernel` was faster."""
    table: dict[str, dict[str, list[Any] | None]] = json.loads(LARGE_M_TABLE.read_text())
    return table


def ranked_tiles(product: LargeMProduct, rows: int, shared_bytes: int) -> list[tuple[float, LargeMTile]]:
    """Tiles that fit, those that waste least first: of the last round of programs, and of reading the rows
    for each of them again. With the cost of each, where reading the weight once costs 1."""
    block_m, row_tiles = (64, 1) if rows <= 64 else (128, -(-rows // 128))
    pieces = 2 if product.gated else 1
    ranked: list[tuple[float, LargeMTile]] = []
    for warps, places, first, rest in itertools.product((4, 8), (1, 2), (32, 64, 128, 256), RESTS):
        columns = (first + rest) * pieces
        # The sum that grows and those that wait for their neighbours.
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
    """The tile of a row class, None where `linear_kernel` is faster or no tile fits."""
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
    """The tile of the product of more than 16 bfloat16 rows, or None where `linear_kernel` has to do it.

    That is with weights or rows of another dtype, on a GPU without the copy engine and in the interpreter,
    with rows of either that do not lie at multiples of 16 bytes, and where the chains of K are not whole
    steps or are added up by programs that wait for one another.
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
