"""Which products `persistent_kernel` computes, and with which tile. Neither changes a bit."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

from compiled_mtp.ops.descriptors import is_describable
from compiled_mtp.ops.device import Device
from compiled_mtp.ops.k_splits import K_SPLIT_UNIT, WIDE_ROWS

# The architecture whose tensor cores the kernel uses.
ARCH = "sm_90"
# Of a row of a step's columns: a row of the swizzle.
STEP_BYTES = 128
# Fewest rows, by the bytes of an element, and multiplications with which the kernel is faster than others:
# measured on an H200 with 27B's and 4B's products of 128 to 1,024 rows.
LEAST_ROWS = {2: 128, 1: 65}
LEAST_PRODUCTS = {2: 9_000_000_000, 1: 3_300_000_000}
# Numbers of the weight, if a norm adds K splits: then from WIDE_ROWS + 1 rows on, as gated products. In FP8 a
# large one from 65 rows on.
LEAST_WEIGHT = 10_000_000
LARGE_WEIGHT = 30_000_000
# Chains of which several programs can take some each: then the weight decides here too.
SHARED_CHAINS = 4
# K splits that are stored apart for the norm: it reads few, and most processors have a task.
WIDE_PARTS = 2
# Chains whose loops are unrolled so that registers hold waiting nodes, weight rows of a tile that leaves room
# for them, and steps of a chain so short that FP8 sums hold a node.
MOST_HELD_CHAINS, HELD_WIDTH, SHORT_CHAIN = 4, 128, 8
# Beyond, one share per row tile leaves too many processors idle.
MOST_ROWS = 4096


@dataclass(frozen=True)
class PersistentTile:
    """Rows and weight rows of a tile, stages of the pipeline, and microseconds on an H200.

    block_n, rest_n: the weight rows of two strips, powers of two, or of one if rest_n is 0.
    step_us: of a step. task_us: to begin a task and to store its result. chain_us: to add a chain's sums to
    those of another. cut_us: to hand sums over, and to take those of another program.
    """

    block_m: int
    block_n: int
    rest_n: int
    num_stages: int
    step_us: float
    task_us: float
    chain_us: float
    cut_us: float


# By the bytes of an element; fitted to the same products. FP8 has 128 weight rows, which share a scale.
TILES = {
    2: (
        PersistentTile(128, 256, 0, 4, 0.66, 3.0, 12.0, 8.0),
        PersistentTile(128, 128, 0, 6, 0.36, 2.5, 1.0, 4.8),
        PersistentTile(128, 128, 32, 6, 0.59, 2.5, 0.7, 6.0),
    ),
    1: (PersistentTile(128, 128, 0, 6, 0.41, 2.8, 1.4, 3.2),),
}
# Microseconds to add the sums of two programs that share a tile.
SHARE_US = 4.0


@dataclass(frozen=True)
class PersistentProduct:
    """How the programs of a launch share a product.

    parts: K splits that are stored apart, or that as many programs add if is_shared. chains: K splits that
    each task sums as a tree. tasks: those of one row tile, of `steps` steps each. shares: programs of one row
    tile.
    """

    tile: PersistentTile
    parts: int
    chains: int
    row_tiles: int
    tasks: int
    steps: int
    shares: int
    is_shared: bool = False

    @property
    def whole_us(self) -> float:
        """Return the estimated time of the programs with the most whole tasks."""
        added = SHARE_US * (self.parts.bit_length() - 1) if self.is_shared else 0.0
        return -(-self.tasks // self.shares) * self._task_us + added

    @property
    def cut_us(self) -> float:
        """Return the estimated time if all programs have equally many steps."""
        return self.tasks / self.shares * self._task_us + self.tile.task_us + self.tile.cut_us

    @property
    def least_us(self) -> float:
        """Return the estimated time of the product."""
        return self.whole_us if self.is_shared else min(self.whole_us, self.cut_us)

    @property
    def _task_us(self) -> float:
        tile = self.tile
        return self.steps * tile.step_us + tile.task_us + (self.chains - 1) * tile.chain_us

    @property
    def is_cut(self) -> bool:
        """Return whether programs cut tasks: they would wait longer for the last of whole ones."""
        return not self.is_shared and self.cut_us < self.whole_us

    @property
    def unit(self) -> int:
        """Return the steps of which a program has whole multiples."""
        return 1 if self.is_cut else self.steps

    def held_levels(self, itemsize: int) -> int:
        """Return how many waiting nodes of a task's tree of chains stay in registers: the smallest.

        In FP8 a node takes the place of a second product in flight, which long chains rather have.
        """
        levels = self.chains.bit_length() - 1
        if self.chains > MOST_HELD_CHAINS or self.tile.block_n > HELD_WIDTH:
            return 0
        if itemsize == 1:
            is_short = self.chains <= 2 or self.steps // self.chains <= SHORT_CHAIN
            return 1 if levels and is_short else 0
        return min(levels, 1 if self.tile.rest_n else 2)

    @property
    def slots(self) -> int:
        """Return the slots of sums per program: of a cut task, and of the waiting nodes of other tasks."""
        return 1 + 2 * (self.chains.bit_length() - 1)


def share_out(
    tile: PersistentTile, rows: int, width: int, k: int, parts: int, chains: int, gated: bool, itemsize: int,
    num_processors: int,
) -> PersistentProduct:  # fmt: skip
    """Return how programs share the tiles of `rows` rows and `width` columns of the result, of K columns."""
    row_tiles = -(-rows // tile.block_m)
    tasks = -(-width * (2 if gated else 1) // (tile.block_n + tile.rest_n)) * parts
    shares = max(1, min(tasks, num_processors // row_tiles))
    return PersistentProduct(
        tile, parts, chains, row_tiles, tasks, k * itemsize // (parts * STEP_BYTES), shares
    )


def share_tiles(product: PersistentProduct, num_processors: int) -> PersistentProduct:
    """Return the product with as many programs per tile as have a processor: each sums some of its chains."""
    most = min(product.chains, num_processors // product.row_tiles // product.tasks)
    if product.parts > 1 or most < 2:
        return product
    count = 1 << (most.bit_length() - 1)
    tasks = product.tasks * count
    return replace(
        product, parts=count, chains=product.chains // count, tasks=tasks, steps=product.steps // count,
        shares=tasks, is_shared=True,
    )  # fmt: skip


def fits(product: PersistentProduct, gated: bool) -> bool:
    """Return whether a tile suits: of two strips only if no gate divides it and each program has one task.

    Programs with two such tasks are slower than those of narrower tiles that are cut: 27B's out takes 69 us
    with 512 rows instead of 61. More than two chains leave no registers to add those of another program.
    """
    is_small = product.tasks == product.shares and not (product.is_shared and product.chains > 2)
    return product.tile.rest_n == 0 or (not gated and is_small)


@functools.lru_cache(maxsize=4096)
def choose_product(
    rows: int, width: int, k: int, parts: int, chains: int, gated: bool, itemsize: int, num_processors: int
) -> PersistentProduct:
    """Return the product with the tile of the least estimated time."""
    last = (width, k, parts, chains, gated, itemsize, num_processors)
    products = (share_tiles(share_out(tile, rows, *last), num_processors) for tile in TILES[itemsize])
    return min((one for one in products if fits(one, gated)), key=lambda product: product.least_us)


def has_few_parts(device: Device, n: int, k: int) -> bool:
    """Return whether a product before a norm has WIDE_PARTS parts above WIDE_ROWS rows."""
    return device.has_copy_engine and device.arch == ARCH and n * k >= LEAST_WEIGHT


def is_worth_it(rows: int, n: int, k: int, itemsize: int, parts: int, chains: int, gated: bool) -> bool:
    """Return whether the kernel is faster than others for `rows` rows and a weight [n, k]."""
    if rows > MOST_ROWS:
        return False
    if parts > 1:
        is_large = itemsize == 1 and n * k >= LARGE_WEIGHT
        return rows >= (LEAST_ROWS[1] if is_large else WIDE_ROWS + 1) and n * k >= LEAST_WEIGHT
    least_rows = WIDE_ROWS + 1 if gated else LEAST_ROWS[itemsize]
    if rows >= least_rows and chains >= SHARED_CHAINS and n * k >= LEAST_WEIGHT:
        return True
    return rows >= least_rows and rows * n * k >= LEAST_PRODUCTS[itemsize]


def find_persistent(
    device: Device, x: torch.Tensor, weight: torch.Tensor, parts: int, chains: int, gated: bool = False
) -> PersistentProduct | None:
    """Return how programs share a product of bfloat16 or FP8 matrices, or None if another kernel computes it.

    Another does so for fewer rows and products than are worth it, beyond MOST_ROWS rows, on a GPU other than
    `ARCH` and in the interpreter, if rows of x or weight do not begin at multiples of 16 bytes, and if chains
    are not whole blocks of K_SPLIT_UNIT.
    """
    (rows, k), n = x.shape, weight.shape[0]
    if not is_worth_it(rows, n, k, x.element_size(), parts, chains, gated):
        return None
    if not device.has_copy_engine or device.arch != ARCH:
        return None
    if k % (parts * chains * K_SPLIT_UNIT) or not (is_describable(x) and is_describable(weight)):
        return None
    width = n // 2 if gated else n
    return choose_product(rows, width, k, parts, chains, gated, x.element_size(), device.num_processors)
