"""Large-M FP8 products, rows as left operand: the bits of `linear_w8a8_kernel`, and which products take that
route."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compiled_mtp.ops.device import Device
from compiled_mtp.ops.k_splits import add_tree, count_k_splits
from compiled_mtp.ops.linear_w8a8 import linear_w8a8, linear_w8a8_partials

pytest.importorskip("triton", reason="Triton exists on Linux only")

from compiled_mtp.ops.linear_w8a8 import kernel as module
from compiled_mtp.ops.linear_w8a8.config import W8A8Config
from compiled_mtp.ops.linear_w8a8.large_m_config import (
    LargeMTile,
    choose_tile,
    find_large_m,
    ranked_tiles,
    read_large_m_table,
    row_class,
)
from compiled_mtp.ops.linear_w8a8.large_m_kernel import launch_large_m

SHARED_BYTES = 227 * 1024
HOPPER = Device("sm_90", SHARED_BYTES, False, True, 132)
FP8 = torch.float8_e4m3fn
Quantised = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def ordered(rows: int, n: int, k: int) -> Quantised:
    """Return whole numbers whose product over 128 columns is exact, with scales that are powers of two.

    Only the order of the blocks decides the bits.
    """
    x = torch.randint(-3, 4, (rows, k)).to(FP8)
    x_scale = 2.0 ** torch.randint(-4, 5, (rows, k // 128)).float()
    scale = 2.0 ** torch.randint(-8, 9, (-(-n // 128), k // 128)).float()
    return x, x_scale, torch.randint(-3, 4, (n, k)).to(FP8), scale


# Pieces and slivers (LargeMTile), in one program and several; weight rows that no tile divides; 1 to 8 K
# splits.
@pytest.mark.parametrize(
    "rows, n, k, tile, split",
    [
        (3, 300, 256, (16, 64, 2, 16), 1),
        (21, 300, 512, (16, 128, 1, 32), 2),
        (21, 130, 1024, (16, 64, 1, 0), 1),
        (5, 330, 1024, (16, 64, 2, 32), 4),
    ],
)
def test_every_tile_has_the_bits_of_the_other_kernel(
    interpreter: None, rows: int, n: int, k: int, tile: tuple[int, ...], split: int
) -> None:
    args, length = ordered(rows, n, k), k // count_k_splits(k)
    got = launch_large_m(LargeMTile(*tile, 4, 3), *args, split, length, torch.float32)
    wanted = module.launch_config(W8A8Config(16, 64, 4, 3), *args, split, length, torch.float32)
    assert got.shape == (split, rows, n)
    assert torch.equal(got, wanted)
    reference = linear_w8a8_partials.reference(*args, split, 0, True)
    torch.testing.assert_close(got, reference, rtol=1e-5, atol=1e-2)


def test_operators_have_the_same_bits_for_every_number_of_rows(
    interpreter: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than 16 rows use descriptors if they are aligned; fewer rows do not."""
    launched: list[LargeMTile] = []

    def launch(tile: LargeMTile, *rest: Any) -> torch.Tensor:
        launched.append(tile)
        return launch_large_m(tile, *rest)

    monkeypatch.setattr(module, "device_of", lambda index: HOPPER)
    monkeypatch.setattr(module, "launch_large_m", launch)
    x, x_scale, weight, scale = ordered(70, 130, 256)
    for call in (
        lambda rows, given: linear_w8a8.launch(given, x_scale[:rows], weight, scale, True),
        lambda rows, given: add_tree(linear_w8a8_partials.launch(given, x_scale[:rows], weight, scale, 2)),
    ):
        wanted = call(70, x)
        launched.clear()
        for rows in (3, 17, 65):
            assert torch.equal(call(rows, x[:rows]), wanted[:rows]), f"{rows} rows"
        assert [tile.block_m for tile in launched] == [64, 128]
        launched.clear()
        unaligned = torch.empty(20, 257).to(FP8)[:, 1:].copy_(x[:20])
        assert torch.equal(call(20, unaligned), wanted[:20])
        assert not launched


def test_which_products_have_descriptors() -> None:
    x, weight = torch.zeros(17, 512).to(FP8), torch.zeros(64, 512).to(FP8)
    wide = torch.zeros(64, 528).to(FP8)
    assert find_large_m(HOPPER, x, weight, 1, 512)
    assert find_large_m(HOPPER, x, weight, 4, 128)
    assert find_large_m(HOPPER, wide[:17, 16:], wide[:, 16:], 1, 512)
    for device in (
        Device("sm_100", SHARED_BYTES, True, True, 148),
        Device("sm_90", SHARED_BYTES, False, False, 3),
    ):
        assert find_large_m(device, x, weight, 1, 512) is None
    assert find_large_m(HOPPER, x[:0], weight, 1, 512) is None
    assert find_large_m(HOPPER, x[:16], weight, 1, 512) is None
    assert find_large_m(HOPPER, wide[:17, 8:520], weight, 1, 512) is None
    assert find_large_m(HOPPER, x, wide[:, 8:520], 1, 512) is None
    # Few rows of a weight whose measured tile uses descriptors.
    few = torch.zeros(4, 5120).to(FP8)
    gate_up = torch.empty(34816, 5120, dtype=FP8)
    assert find_large_m(HOPPER, few, gate_up, 1, 5120) == LargeMTile(64, 128, 2, 16, 8, 5)


@pytest.mark.parametrize("rows", [16, 64, 128, 256, 2048])
def test_tiles_fit(rows: int) -> None:
    """The tiles of the rule and of the table fit, for whole weights and for shards."""
    products = [(34816, 5120, 1, 5120), (16384, 5120, 1, 5120), (300, 256, 1, 256), (5120, 2176, 1, 2176)]
    products += [(5120, 17408, count, 2176) for count in (1, 2, 4, 8)]
    for n, k, count, length in products:
        tiles = ranked_tiles(n, k // (length * count), count, rows, SHARED_BYTES)
        chosen = choose_tile(n, k, count, length, rows, SHARED_BYTES)
        assert tiles
        assert chosen or rows == 16
        for tile in [*tiles, *([chosen] if chosen else [])]:
            assert tile.block_m == (64 if rows <= 64 else 128)
            # A piece, and a sliver, has one block of scales.
            assert 128 % tile.block_n == 0
            assert tile.rest_n == 0 or tile.block_n % tile.rest_n == 0
            stage = 128 * (tile.block_m + tile.width) + 4 * tile.block_m
            out_bytes = 4 * tile.block_m * tile.block_n if length * count < k else 0
            assert tile.num_stages * stage + out_bytes <= SHARED_BYTES - 2048
    assert [row_class(rows) for rows in (1, 16, 17, 65, 129, 257)] == [16, 16, 64, 128, 256, 2048]


def test_the_table_names_products_and_row_classes() -> None:
    for name, rows in read_large_m_table().items():
        size, kind = name.split()
        assert all(number.isdigit() for number in size.split("x"))
        assert kind in ("product", "parts1", "parts2", "parts4", "parts8"), name
        assert set(rows) <= {"16", "64", "128", "256", "2048"}, name
        for height, fields in rows.items():
            if fields is not None:
                assert LargeMTile(*fields).block_m == (64 if int(height) <= 64 else 128), name
