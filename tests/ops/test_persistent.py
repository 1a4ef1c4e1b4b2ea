"""The product of many rows by persistent programs: order of sums, cuts, flags. Its Python runs on a CPU.

Layouts and the tensor cores' own order are tests/gpu's.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compiled_mtp.ops.device import Device
from compiled_mtp.ops.k_splits import add_tree
from compiled_mtp.ops.persistent_config import (
    MOST_ROWS,
    STEP_BYTES,
    TILES,
    PersistentProduct,
    PersistentTile,
    choose_product,
    find_persistent,
    share_out,
    share_tiles,
)

pytest.importorskip("triton", reason="Triton exists on Linux only")

from compiled_mtp.ops import persistent_config
from compiled_mtp.ops import persistent_product as module
from compiled_mtp.ops.counters import zero_counters
from compiled_mtp.ops.silu_mul import silu_mul
from tests.ops import persistent_on_cpu

FP8 = torch.float8_e4m3fn
SHARED_BYTES = 227 * 1024
HOPPER = Device("sm_90", SHARED_BYTES, True, True, 132)
# Only steps take time: every task that can be cut is cut.
SMALL = PersistentTile(128, 128, 0, 3, 1.0, 0.0, 0.0, 0.0)
WIDE = PersistentTile(128, 256, 0, 2, 1.0, 0.0, 0.0, 0.0)
# Two strips of weight rows.
V = PersistentTile(128, 128, 32, 3, 1.0, 0.0, 0.0, 0.0)
W = PersistentTile(128, 128, 64, 3, 1.0, 0.0, 0.0, 0.0)
Operands = tuple[torch.Tensor, ...]


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> persistent_on_cpu.Kernel:
    stand_in = persistent_on_cpu.Kernel(module.persistent_kernel)
    monkeypatch.setattr(module, "persistent_kernel", stand_in)
    monkeypatch.setattr(module, "device_of", lambda index: HOPPER)
    return stand_in


def ordered(rows: int, n: int, k: int) -> Operands:
    """Return whole numbers whose sum over a step of 64 columns is exact.

    Each step has its own power of two, so only the order of the steps decides the bits.
    """
    x = torch.randint(-3, 4, (rows, k)).bfloat16()
    power = torch.randint(-12, 13, (n, k // 64)).repeat_interleave(64, 1)
    return x, (torch.randint(-3, 4, (n, k)) * 2.0**power).bfloat16()


def ordered_blocks(rows: int, n: int, k: int) -> Operands:
    """Return FP8 rows and weight with scales; only the order of blocks of 128 columns decides the bits."""
    x = torch.randint(-3, 4, (rows, k)).to(FP8)
    x_scale = 2.0 ** torch.randint(-4, 5, (rows, k // 128)).float()
    scale = 2.0 ** torch.randint(-8, 9, (-(-n // 128), k // 128)).float()
    return x, torch.randint(-3, 4, (n, k)).to(FP8), x_scale, scale


def sum_chain(x: torch.Tensor, weight: torch.Tensor, step: int = 64) -> torch.Tensor:
    """Return x @ weight.T with one step of columns added to a float32 sum after another."""
    total = torch.zeros(len(x), len(weight))
    for left, right in zip(x.double().split(step, 1), weight.double().split(step, 1), strict=True):
        total = (total.double() + left @ right.T).float()
    return total


def sum_parts(x: torch.Tensor, weight: torch.Tensor, parts: int, chains: int, step: int = 64) -> torch.Tensor:
    pieces = zip(x.chunk(parts * chains, 1), weight.chunk(parts * chains, 1), strict=True)
    sums = [sum_chain(*piece, step) for piece in pieces]
    return torch.stack([add_tree(sums[first : first + chains]) for first in range(0, len(sums), chains)])


def values_of(x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor, scale: torch.Tensor) -> Operands:
    """Return the values of quantised operands, which float32 holds exactly."""
    columns = x_scale.repeat_interleave(128, 1)
    both = scale.repeat_interleave(128, 0)[: len(weight)].repeat_interleave(128, 1)
    return x.float() * columns, weight.float() * both


def share(
    tile: PersistentTile, x: torch.Tensor, n: int, parts: int, chains: int, shares: int
) -> PersistentProduct:
    """Return how `shares` programs per row tile share a product, or fewer if there are fewer tasks."""
    (rows, k), tasks = x.shape, -(-n // (tile.block_n + tile.rest_n)) * parts
    steps = k * x.element_size() // (parts * STEP_BYTES)
    return PersistentProduct(tile, parts, chains, -(-rows // tile.block_m), tasks, steps, min(tasks, shares))


# One and several row tiles; weight rows that no tile divides; tasks cut inside a chain, between chains and
# not at all; up to 16 chains in a task.
@pytest.mark.parametrize(
    "tile, rows, n, k, parts, chains, shares",
    [
        (WIDE, 20, 700, 256, 1, 1, 3),
        (WIDE, 20, 700, 640, 1, 1, 2),
        (SMALL, 20, 1500, 256, 1, 1, 5),
        (SMALL, 20, 2500, 128, 1, 1, 7),
        (SMALL, 130, 600, 512, 2, 1, 7),
        (SMALL, 20, 330, 512, 1, 2, 2),
        (SMALL, 20, 330, 768, 1, 4, 2),
        # Cut inside each of four chains.
        (SMALL, 20, 630, 1024, 1, 4, 4),
        (SMALL, 20, 300, 1024, 1, 8, 2),
        (WIDE, 150, 700, 1024, 1, 8, 2),
        (SMALL, 20, 300, 2048, 1, 16, 2),
        (SMALL, 20, 300, 1024, 2, 4, 5),
        (SMALL, 20, 300, 1024, 4, 2, 7),
        (V, 20, 700, 640, 1, 1, 2),
        (V, 140, 700, 1024, 1, 8, 3),
        (V, 20, 630, 1024, 1, 4, 3),
        (W, 20, 700, 1024, 1, 4, 3),
        (W, 140, 700, 1024, 2, 2, 3),
    ],
)
def test_sums_have_one_order(
    kernel: persistent_on_cpu.Kernel,
    tile: PersistentTile,
    rows: int,
    n: int,
    k: int,
    parts: int,
    chains: int,
    shares: int,
) -> None:
    x, weight = ordered(rows, n, k)
    product = share(tile, x, n, parts, chains, shares)
    got = module.launch_persistent(product, x, weight, torch.float32)
    assert got.shape == (parts, rows, n)
    assert torch.equal(got, sum_parts(x, weight, parts, chains))
    cuts = sum(program.flags_taken for program in kernel.programs)
    assert cuts == sum(program.flags_set for program in kernel.programs)
    assert (cuts > 0) == product.is_cut
    assert not zero_counters(x.device).any()


@pytest.mark.parametrize("tile", [SMALL, V])
@pytest.mark.parametrize("rows, chains, processors", [(140, 4, 40), (20, 8, 24), (20, 8, 99), (260, 2, 40)])
def test_programs_share_a_tile(
    kernel: persistent_on_cpu.Kernel, tile: PersistentTile, rows: int, chains: int, processors: int
) -> None:
    x, weight = ordered(rows, 600, 1024)
    product = share_tiles(share_out(tile, rows, 600, 1024, 1, chains, False, 2, processors), processors)
    assert product.is_shared
    assert product.parts * product.chains == chains
    assert product.shares * product.row_tiles <= processors
    (got,) = module.launch_persistent(product, x, weight, torch.float32)
    assert torch.equal(got, sum_parts(x, weight, 1, chains)[0])
    assert sum(program.flags_set for program in kernel.programs) > 0
    assert not zero_counters(x.device).any()


@pytest.mark.parametrize(
    "tile, rows, n, parts, chains, shares",
    [
        (SMALL, 20, 640, 1, 1, 2),
        (SMALL, 130, 320, 2, 2, 5),
        (SMALL, 140, 1100, 1, 1, 2),
        (SMALL, 20, 300, 1, 4, 2),
        (SMALL, 140, 640, 2, 4, 3),
    ],
)
def test_blocks_have_one_order(
    kernel: persistent_on_cpu.Kernel,
    tile: PersistentTile,
    rows: int,
    n: int,
    parts: int,
    chains: int,
    shares: int,
) -> None:
    x, weight, x_scale, scale = ordered_blocks(rows, n, 1024)
    product = share(tile, x, n, parts, chains, shares)
    scales = {"x_scale": x_scale, "weight_scale": scale}
    got = module.launch_persistent(product, x, weight, torch.float32, **scales)
    assert torch.equal(got, sum_parts(*values_of(x, weight, x_scale, scale), parts, chains, 128))
    assert sum(program.flags_taken for program in kernel.programs) > 0


def test_nodes_of_long_chains_wait_in_slots(kernel: persistent_on_cpu.Kernel, monkeypatch: Any) -> None:
    monkeypatch.setattr(persistent_config, "SHORT_CHAIN", 0)
    x, weight, x_scale, scale = ordered_blocks(20, 640, 1024)
    product = share(SMALL, x, 640, 2, 4, 3)
    assert product.held_levels(1) == 0
    got = module.launch_persistent(product, x, weight, torch.float32, x_scale=x_scale, weight_scale=scale)
    assert torch.equal(got, sum_parts(*values_of(x, weight, x_scale, scale), 2, 4, 128))


@pytest.mark.parametrize("tile, shares", [(WIDE, 3), (SMALL, 3), (W, 4)])
def test_a_gated_product_is_silu_mul_of_the_rounded_sums(
    kernel: persistent_on_cpu.Kernel, tile: PersistentTile, shares: int
) -> None:
    x, weight = ordered(140, 2 * 500, 320)
    weight = weight * 2.0**-18
    product = share(tile, x, 2 * 500, 1, 1, shares)
    (got,) = module.launch_persistent(product, x, weight, torch.bfloat16, gated=True)
    assert got.shape == (140, 500)
    torch.testing.assert_close(got, silu_mul.reference(sum_chain(x, weight).bfloat16()), rtol=1e-2, atol=0)
    assert sum(program.flags_taken for program in kernel.programs) > 0


def test_all_processors_work_equally_long() -> None:
    """27B's products of 256 rows leave few processors idle, have the tile that was faster, and it fits."""
    for width, k, parts, chains, gated, is_cut, strips in (
        (17408, 5120, 1, 1, True, True, (256, 0)),
        (5120, 17408, 2, 4, False, True, (128, 0)),
        (5120, 6144, 2, 4, False, False, (128, 32)),
        (16480, 5120, 1, 2, False, False, (128, 0)),
        (5120, 10240, 1, 4, False, False, (128, 32)),
    ):
        product = choose_product(256, width, k, parts, chains, gated, 2, 132)
        assert (product.tile.block_n, product.tile.rest_n) == strips
        assert product.is_shared == (k == 10240)
        assert product.shares * product.row_tiles >= 120
        assert product.shares <= product.tasks
        assert product.is_cut == is_cut
    for tile in (tile for tiles in TILES.values() for tile in tiles):
        size = tile.num_stages * (STEP_BYTES * (tile.block_m + tile.block_n + tile.rest_n) + 16)
        assert size + 1024 <= SHARED_BYTES
        # Two warpgroups of 64 rows; the copy engine takes at most 256 rows per copy.
        assert tile.block_m == 128
        assert tile.block_n <= 256
    # Registers hold the nodes of few chains, in FP8 of short ones.
    down, out = (share_out(TILES[1][0], 256, 5120, k, 2, 4, False, 1, 132) for k in (17408, 6144))
    assert (down.held_levels(1), out.held_levels(1)) == (0, 1)
    assert share_out(TILES[2][1], 256, 5120, 6144, 2, 4, False, 2, 132).held_levels(2) == 2
    # A slot for a cut task, and two for each level of a tree of chains.
    assert share_out(SMALL, 256, 17408, 5120, 1, 1, True, 2, 132).slots == 1
    assert share_out(SMALL, 256, 5120, 17408, 4, 2, False, 2, 132).slots == 3
    assert PersistentProduct(SMALL, 1, 4, 1, 4, 8, 2).slots == 5
    # More row tiles than processors.
    assert share_out(SMALL, 32768, 512, 512, 1, 1, False, 2, 132).shares == 1


def find(
    device: Device,
    rows: int,
    n: int,
    k: int,
    dtype: torch.dtype = torch.bfloat16,
    parts: int = 1,
    chains: int = 1,
    gated: bool = False,
) -> bool:
    """Return whether a product is persistent, of matrices without memory."""
    x, weight = (torch.empty(height, k, dtype=dtype, device="meta") for height in (rows, n))
    return find_persistent(device, x, weight, parts, chains, gated) is not None


def test_which_products_are_persistent() -> None:
    assert find(HOPPER, 128, 14336, 5120, chains=2)
    assert find(HOPPER, 129, 34816, 5120, gated=True)
    assert find(HOPPER, 256, 34816, 5120, chains=8)
    assert find(HOPPER, MOST_ROWS, 5120, 6144)
    # Fewer rows; in FP8 fewer are enough; too little work.
    assert not find(HOPPER, 127, 34816, 5120)
    assert not find(HOPPER, 128, 34816, 5120, gated=True)
    assert find(HOPPER, 65, 34816, 5120, FP8)
    assert not find(HOPPER, 64, 248320, 5120, FP8)
    assert not find(HOPPER, 256, 5120, 6144)
    # Programs share the chains of a large weight; without four chains the work decides.
    assert find(HOPPER, 128, 5120, 10240, chains=4)
    assert not find(HOPPER, 127, 5120, 10240, chains=4)
    assert not find(HOPPER, 128, 5120, 10240, chains=2)
    assert not find(HOPPER, 512, 1024, 2048, chains=8)
    assert find(HOPPER, 512, 5120, 6144)
    assert not find(HOPPER, MOST_ROWS + 1, 34816, 5120)
    # Before a norm, the weight decides.
    for dtype in (torch.bfloat16, FP8):
        assert find(HOPPER, 129, 2560, 4096, dtype, 2, 4)
        assert not find(HOPPER, 128, 2560, 4096, dtype, 2, 4)
        assert not find(HOPPER, 1024, 1024, 4096, dtype, 2, 4)
    assert not find(HOPPER, 128, 5120, 17408, parts=2, chains=4)
    assert find(HOPPER, 65, 5120, 17408, FP8, 4, 2)
    assert not find(HOPPER, 64, 5120, 17408, FP8, 4, 2)
    # Other GPUs, and the interpreter.
    assert not find(Device("sm_100", SHARED_BYTES, True, True, 148), 256, 34816, 5120)
    assert not find(Device("sm_90", SHARED_BYTES, False, False, 3), 256, 34816, 5120)
    # Chains that are not whole blocks; rows that do not begin at multiples of 16 bytes.
    assert not find(HOPPER, 256, 34816, 5120 + 128, chains=2)
    assert not find(HOPPER, 256, 34816, 5124)
