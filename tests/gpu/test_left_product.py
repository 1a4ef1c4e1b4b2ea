"""Products of decoded weight rows on a GPU: every tile of both kernels has the same bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from compiled_mtp.ops import left_product
from compiled_mtp.ops.counters import zero_counters
from compiled_mtp.ops.device import device_of
from compiled_mtp.ops.left_config import LargeMTile, LeftTile, large_m_tile, left_tile
from compiled_mtp.ops.left_large_m import launch_left_large_m
from compiled_mtp.ops.left_launch import launch_left_product
from compiled_mtp.ops.left_operand import LeftWeight
from compiled_mtp.ops.left_product import launch_left
from tests.ops.test_left_product import NAMES, random_weight

pytestmark = pytest.mark.gpu

ROWS = (1, 16, 17, 24, 32, 33, 64, 65, 128, 129)
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("n", "units", "split", "gated"), [(1120, 7, 8, False), (1120, 41, 1, True)])
def test_every_tile_of_both_kernels_has_the_same_bits(
    name: str, n: int, units: int, split: int, gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(n + units)
    k = 128 * units * split
    weight = random_weight(name, n, k)
    weight = LeftWeight(weight.words.cuda(), weight.scales.cuda(), weight.form)
    x = torch.randn(129, k, device="cuda").bfloat16()
    whole = launch_left(LeftTile(8, 32, 2, 2, 3), x, weight, split, torch.float32, gated)
    assert whole.isfinite().all()
    device = device_of(x.device.index)
    chosen = {left_tile(rows, n, split, gated, weight.form, device) for rows in ROWS}
    # Programs that share tasks: 35 or 70 of one tile of rows, eight times as many with K splits.
    shared = {
        replace(tile, per_processor=1) for tile in (LeftTile(8, 32, 2, 2, 3), LeftTile(16, 64, 4, 2, 3))
    }
    few = replace(device, num_processors=7)
    monkeypatch.setattr(left_product, "device_of", lambda index: few)
    for tile in chosen | shared:
        for rows in ROWS:
            got = launch_left(tile, x[:rows], weight, split, torch.float32, gated)
            assert torch.equal(got, whole[:, :rows]), (tile, rows)
    # The first has so many cycles that programs cut tasks.
    large = {
        LargeMTile(32, 2, 232, 4, cycles=100_000),
        LargeMTile(32, 2, 232, 2, 2, 1),
        LargeMTile(8, 2, 232, 2, 4, 0),
        LargeMTile(16, 2, 232, 2, 2, 0, cycles=100_000),
        *(large_m_tile(rows, n, split, units, weight.form) for rows in ROWS if rows > 16),
    }
    for other in large if HOPPER else ():
        for rows in ROWS:
            got = launch_left_large_m(other, x[:rows], weight, split, torch.float32, gated)
            assert torch.equal(got, whole[:, :rows]), (other, rows)


# 27B's qkvz, gate and up, and down: whole tasks, tasks that programs cut, and K splits.
@pytest.mark.parametrize("name", ["int4 g128", "int4 g32", "NVFP4", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "IQ4_XS"])
@pytest.mark.parametrize(("n", "split", "gated"), [(16_480, 1, False), (34_816, 1, True), (5_120, 8, False)])
def test_each_number_of_rows_has_the_same_bits_in_the_kernel_that_is_chosen(
    name: str, n: int, split: int, gated: bool
) -> None:
    torch.manual_seed(n)
    k = 640 * max(split, 2)
    weight = random_weight(name, n, k)
    weight = LeftWeight(weight.words.cuda(), weight.scales.cuda(), weight.form)
    x = torch.randn(33, k, device="cuda").bfloat16()
    whole = launch_left(LeftTile(8, 32, 2, 2, 3), x, weight, split, torch.bfloat16, gated)
    assert whole.isfinite().all()
    for rows in range(1, 34):
        got = launch_left_product(x[:rows], weight, split, torch.bfloat16, gated)
        assert torch.equal(got, whole[:, :rows]), rows
    assert not zero_counters(x.device).any()
