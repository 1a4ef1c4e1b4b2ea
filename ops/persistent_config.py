"""Which products `persistent_kernel` computes, and with which tile. Neither changes a bit."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from compiled_mtp.ops.descriptors import is_describable
from compiled_mtp.ops.device import Device
from compiled_mtp.ops.k_splits import K_SPLIT_UNIT

# The architecture whose tensor cores the kernel uses.
ARCH = "sm_90"
# Of a row of a step's columns: a row of the swizzle.
STEP_BYTES = 128
# Handing sums over takes about a tenth of a product's time: tasks are cut where whole ones take more.
MOST_IDLE = 1.1
# With fewer rows (by the bytes of an element) or multiplications other kernels are faster: measured on an
# H200 with 27B's products of 128 to 1,024 rows.
LEAST_ROWS = {2: 129, 1: 65}
LEAST_PRODUCTS = 12_000_000_000
# Beyond, one share per row tile leaves too many processors idle.
MOST_ROWS = 4096


@dataclass(frozen=True)
class PersistentTile:
    """Rows and weight rows of a tile, and stages of the pipeline.

    cost: time per row and weight row, relative to other tiles of the same dtype.
    """

    block_m: int
    block_n: int
    num_stages: int
    cost: float


# By the bytes of an element. FP8 has 128 weight rows, which share a scale: a block's product takes as many
# registers as the sums.
TILES = {
    2: (PersistentTile(128, 256, 4, 1.0), PersistentTile(128, 128, 6, 1.05)),
    1: (PersistentTile(128, 128, 6, 1.0),),
}


@dataclass(frozen=True)
class PersistentProduct:
    """How the programs of a launch share a product.

    parts: K splits that are stored apart. chains: K splits that each task sums as a tree. tasks: those of one
    row tile. shares: programs of one row tile.
    """

    tile: PersistentTile
    parts: int
    chains: int
    row_tiles: int
    tasks: int
    shares: int

    @property
    def is_cut(self) -> bool:
        """Return whether programs cut tasks: whole ones would leave too many processors idle in the end."""
        return -(-self.tasks // self.shares) * self.shares > MOST_IDLE * self.tasks

    @property
    def slots(self) -> int:
        """Return the slots of sums per program: of a cut task, and of the waiting nodes of other tasks."""
        return 1 + 2 * (self.chains.bit_length() - 1)


def share_out(
    tile: PersistentTile, rows: int, width: int, parts: int, chains: int, gated: bool, num_processors: int
) -> PersistentProduct:
    """Return how programs share the tiles of `rows` rows and `width` columns of the result."""
    row_tiles = -(-rows // tile.block_m)
    tasks = -(-width // (tile.block_n // 2 if gated else tile.block_n)) * parts
    shares = max(1, min(tasks, num_processors // row_tiles))
    return PersistentProduct(tile, parts, chains, row_tiles, tasks, shares)


@functools.lru_cache(maxsize=4096)
def choose_product(
    rows: int, width: int, parts: int, chains: int, gated: bool, itemsize: int, num_processors: int
) -> PersistentProduct:
    """Return the product with the tile of the least estimated time."""

    def time(product: PersistentProduct) -> float:
        tile, tasks = product.tile, product.tasks / product.shares
        tasks = min(math.ceil(tasks), tasks * MOST_IDLE) if product.tasks > product.shares else 1.0
        return tasks * tile.block_m * tile.block_n * tile.cost

    found = [share_out(tile, rows, width, parts, chains, gated, num_processors) for tile in TILES[itemsize]]
    return min(found, key=time)


def find_persistent(
    device: Device, x: torch.Tensor, weight: torch.Tensor, parts: int, chains: int, gated: bool = False
) -> PersistentProduct | None:
    """Return how programs share a product of bfloat16 or FP8 matrices, or None if another kernel computes it.

    Another does so for fewer rows and products than are worth it, beyond MOST_ROWS rows, on a GPU other than
    `ARCH` and in the interpreter, if rows of x or weight do not begin at multiples of 16 bytes, and if chains
    are not whole blocks of K_SPLIT_UNIT.
    """
    (rows, k), n = x.shape, weight.shape[0]
    if not LEAST_ROWS[x.element_size()] <= rows <= MOST_ROWS or rows * n * k < LEAST_PRODUCTS:
        return None
    if not device.has_copy_engine or device.arch != ARCH:
        return None
    if k % (parts * chains * K_SPLIT_UNIT) or not (is_describable(x) and is_describable(weight)):
        return None
    width = n // 2 if gated else n
    return choose_product(rows, width, parts, chains, gated, x.element_size(), device.num_processors)
