"""Large-M products by the copy engine: the bits of `linear_kernel`, and which products take that route."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from compiled_mtp.ops.device import Device
from compiled_mtp.ops.k_splits import add_tree
from compiled_mtp.ops.linear import linear, linear_partials, linear_silu_mul
from compiled_mtp.ops.linear.config import LinearConfig, choose

pytest.importorskip("triton", reason="Triton exists on Linux only")

from compiled_mtp.ops import persistent_config, persistent_product
from compiled_mtp.ops.linear import kernel as module
from compiled_mtp.ops.linear.large_m_config import (
    MOST_SUM_REGISTERS,
    LargeMProduct,
    LargeMTile,
    choose_tile,
    find_large_m,
    ranked_tiles,
    read_large_m_table,
    row_class,
)
from compiled_mtp.ops.linear.large_m_kernel import launch_large_m
from tests.ops import persistent_on_cpu
from tests.ops.test_compile import TABLE, finish, start_compiler

SHARED_BYTES = 227 * 1024
HOPPER = Device("sm_90", SHARED_BYTES, False, True, 132)
# 27B's gate|up and down, whose tiles are measured.
GATE_UP, DOWN = (
    LargeMProduct(34816, 5120, 1, 1, gated=True),
    LargeMProduct(5120, 17408, 4, 2, keep_partials=True),
)


def ordered(rows: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return whole numbers whose sum over a step of 64 columns is exact.

    Each step has its own power of two, so only the order of the steps decides the bits.
    """
    x = torch.randint(-3, 4, (rows, k + 8)).bfloat16()
    x[:, k:] = float("nan")
    power = torch.randint(-12, 13, (n, k // 64)).repeat_interleave(64, 1)
    return x[:, :k], (torch.randint(-3, 4, (n, k)) * 2.0**power).bfloat16()


@pytest.fixture
def hopper(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> list[LargeMTile]:
    """The operators take the interpreter for a GPU with a copy engine; gives the tiles that they launch.

    For more rows persistent programs run on the CPU too, without their own tile in the list.
    """
    launched: list[LargeMTile] = []

    def launch(tile: LargeMTile, *rest: Any) -> torch.Tensor:
        launched.append(tile)
        return launch_large_m(tile, *rest)

    monkeypatch.setattr(module, "device_of", lambda index: HOPPER)
    monkeypatch.setattr(module, "launch_large_m", launch)
    monkeypatch.setattr(
        persistent_product, "device_of", lambda index: replace(HOPPER, has_dependent_launch=True)
    )
    persistent = persistent_on_cpu.Kernel(persistent_product.persistent_kernel)
    monkeypatch.setattr(persistent_product, "persistent_kernel", persistent)
    monkeypatch.setattr(persistent_config, "LEAST_PRODUCTS", {2: 0, 1: 0})
    monkeypatch.setattr(persistent_config, "LEAST_WEIGHT", 0)
    return launched


# Tiles of two parts and of one; several row tiles; weight rows that no tile divides; K in 1 to 8 chains.
@pytest.mark.parametrize(
    "rows, n, height, widths, chains",
    [
        (21, 60, 16, (32, 16), 1),
        (70, 51, 32, (32, 0), 2),
        (17, 108, 16, (64, 32), 4),
        (40, 40, 64, (32, 0), 8),
    ],
)
def test_every_tile_has_the_bits_of_linear_kernel(
    interpreter: None, rows: int, n: int, height: int, widths: tuple[int, int], chains: int
) -> None:
    k = max(256, chains * 128)
    x, weight = ordered(rows, n, k)
    config = LinearConfig(32, 64, 64, 4, 2, 1, chains, 0, sequential=True)
    wanted = module.launch_config(config, x, weight, None, True)
    torch.testing.assert_close(wanted, (x.double() @ weight.double().T).float(), rtol=1e-4, atol=1e-2)
    for apart in (False, True):
        tile = LargeMTile(height, *widths, 64, 4, 3, apart=apart)
        assert torch.equal(
            launch_large_m(tile, LargeMProduct(n, k, 1, chains), x, weight, torch.float32), wanted
        )
    for split in (s for s in (2, 4) if s <= chains):
        product = LargeMProduct(n, k, split, chains // split, keep_partials=True)
        parts = launch_large_m(tile, product, x, weight, torch.float32)
        assert parts.shape == (split, rows, n)
        assert torch.equal(add_tree(parts), wanted), f"{split} programs"


@pytest.mark.parametrize("widths, chains", [((16, 0), 1), ((32, 16), 2), ((32, 8), 1)])
def test_gated_tiles_have_the_bits_of_linear_kernel(
    interpreter: None, widths: tuple[int, int], chains: int
) -> None:
    x, weight = ordered(19, 2 * 54, 256)
    weight = weight * 2.0**-18
    config = LinearConfig(32, 32, 64, 4, 2, 1, chains, 0, sequential=True)
    wanted = module.launch_config(config, x, weight, None, False, gated=True)
    product = LargeMProduct(2 * 54, 256, 1, chains, gated=True)
    got = launch_large_m(LargeMTile(16, *widths, 64, 4, 3), product, x, weight, torch.bfloat16)
    assert got.shape == (19, 54)
    assert torch.equal(got, wanted)


Call = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
CALLS: dict[str, Call] = {
    "linear": lambda x, w: linear.launch(x, w, None, True),
    "gated": lambda x, w: linear_silu_mul.launch(x, w * 2.0**-18),
    "partials": lambda x, w: add_tree(linear_partials.launch(x, w, None, 2)),
    "shard": lambda x, w: add_tree(linear_partials.launch(x[:, 256:], w[:, 256:], None, 1, 66, 512)),
}


@pytest.mark.parametrize("name", CALLS)
def test_operators_have_the_same_bits_for_every_number_of_rows(hopper: list[LargeMTile], name: str) -> None:
    """From 17 rows on, products use descriptors; with fewer rows, and with unaligned rows, they do not.

    From 129 rows on programs are persistent.
    """
    x, weight = ordered(256, 66, 512)
    call = CALLS[name]
    wanted = call(x, weight)
    heights = []
    for rows in (1, 16, 17, 64, 65, 129):
        hopper.clear()
        assert torch.equal(call(x[:rows], weight), wanted[:rows]), f"{rows} rows"
        heights += [tile.block_m for tile in hopper]
        assert len(hopper) == (16 < rows <= 128)
    assert heights == [64, 64, 128]
    hopper.clear()
    unaligned = torch.empty(70, 513).bfloat16()[:, 1:].copy_(x[:70])
    assert torch.equal(call(unaligned, weight), wanted[:70])
    assert not hopper


def find(device: Device, x: torch.Tensor, weight: torch.Tensor, split: int = 0) -> bool:
    config = choose(x, weight, (0, 0), False, split)
    return find_large_m(device, x, weight, config, False, split > 0) is not None


def test_which_products_have_descriptors() -> None:
    x, weight = torch.zeros(17, 512).bfloat16(), torch.zeros(64, 512).bfloat16()
    assert find(HOPPER, x, weight)
    assert find(HOPPER, x, weight, 4)
    assert find(HOPPER, torch.zeros(300, 512).bfloat16(), weight)
    # The number of weight rows may be odd.
    assert find(HOPPER, x, weight[:51])
    assert not find(HOPPER, x[:16], weight)
    assert not find(HOPPER, x.float(), weight.float())
    assert not find(HOPPER, x, weight.to(torch.float8_e4m3fn))
    # Other GPUs, and the interpreter.
    assert not find(Device("sm_80", 163 * 1024, False, False, 108), x, weight)
    assert not find(Device("sm_100", SHARED_BYTES, True, True, 148), x, weight)
    assert not find(Device("sm_90", SHARED_BYTES, False, False, 3), x, weight)
    # Rows that do not begin at multiples of 16 bytes.
    wide = torch.zeros(64, 520).bfloat16()
    assert find(HOPPER, wide[:17, 8:], wide[:, 8:])
    assert not find(HOPPER, wide[:17, 4:516], weight)
    assert not find(HOPPER, x, wide[:, 4:516])
    assert not find(HOPPER, torch.zeros(17, 516).bfloat16()[:, :512], weight)
    # Chains that are not whole steps, and programs that wait for one another.
    assert not find(HOPPER, torch.zeros(17, 328).bfloat16(), torch.zeros(64, 328).bfloat16())
    assert not LargeMProduct(64, 512, 2, 1).is_even
    assert LargeMProduct(64, 512, 2, 1, keep_partials=True).is_even


def test_a_measured_tile_comes_before_the_rule() -> None:
    assert choose_tile(GATE_UP, 128, SHARED_BYTES) == LargeMTile(128, 128, 8, 64, 8, 4)
    assert choose_tile(DOWN, 128, SHARED_BYTES) == LargeMTile(128, 128, 32, 128, 8, 3, apart=True)
    # Without descriptors this product is faster.
    assert choose_tile(DOWN, 64, SHARED_BYTES) is None
    for product in (GATE_UP, DOWN):
        assert choose_tile(product, 256, SHARED_BYTES) == ranked_tiles(product, 256, SHARED_BYTES)[0][1]
    assert [row_class(rows) for rows in (17, 64, 65, 128, 129, 256, 300)] == [64, 64, 128, 128, 256, 256, 256]


def test_the_rule_runs_all_programs_at_once() -> None:
    best = ranked_tiles(GATE_UP, 128, SHARED_BYTES)[0][1]
    assert 120 <= -(-17408 // (best.block_n + best.rest_n)) <= 132


@pytest.mark.parametrize("rows", [64, 128, 256])
def test_tiles_fit(rows: int) -> None:
    """The tiles of the rule and of the table fit, for whole weights and for shards."""
    products = [GATE_UP, DOWN, LargeMProduct(248320, 5120, 1, 2), LargeMProduct(64, 512, 1, 4)]
    products += [LargeMProduct(5120, 6144, split, 8 // split, keep_partials=True) for split in (1, 2, 4, 8)]
    products += [
        LargeMProduct(4352, 5120, 1, 1, gated=True),
        LargeMProduct(5120, 2176, 1, 1, keep_partials=True),
    ]
    for product in products:
        tiles = [tile for _, tile in ranked_tiles(product, rows, SHARED_BYTES)]
        chosen = choose_tile(product, rows, SHARED_BYTES)
        assert tiles
        for tile in [*tiles, *([chosen] if chosen else [])]:
            columns = (tile.block_n + tile.rest_n) * (2 if product.gated else 1)
            assert tile.num_stages * tile.block_k * 2 * (tile.block_m + columns) <= SHARED_BYTES - 2048
            sums = tile.block_m * columns // (32 * tile.num_warps) * product.chains.bit_length()
            # With a loop per chain, more registers are free; test_one_class_of_products looks for spills.
            assert sums <= (192 if tile.apart else max(MOST_SUM_REGISTERS))
            # The copy engine takes at most 256 rows per copy.
            assert max(tile.block_m, tile.block_n) <= 256
            assert 128 % tile.block_k == 0


def test_the_table_names_products_and_row_classes() -> None:
    for name, rows in read_large_m_table().items():
        size, kind = name.split()
        n, k = map(int, size.split("x"))
        count = int(kind.removeprefix("parts")) if kind.startswith("parts") else 1
        assert kind in ("gated", "product") or count in (1, 2, 4, 8), name
        assert LargeMProduct(n, k, count, 1, kind == "gated", kind.startswith("parts")).name == name
        assert set(rows) <= {"64", "128", "256"}, name
        for height, fields in rows.items():
            if fields is not None:
                tile = LargeMTile(*fields)
                assert tile.block_m == min(int(height), 128), name
                assert 128 % tile.block_k == 0, name


@pytest.mark.kernels
@pytest.mark.timeout(1800)
def test_one_class_of_products() -> None:
    """Every tile multiplies by warp-group instructions, without spills."""
    found = finish(start_compiler([90], ["linear"], "--products"))
    names = ("linear/large_m-", "linear/persistent-")
    large = {key: products for key, products in found.items() if key.startswith(names)}
    assert all(sum(key.startswith(name) for key in large) > 5 for name in names)
    assert all(set(products) == {"HGMMA"} for products in large.values()), large
    for recorded in json.loads(TABLE.read_text()).values():
        kept = {key: row["stack_bytes"] for key, row in recorded.items() if key in large}
        assert kept.keys() == large.keys()
        assert not any(kept.values()), kept
