"""Products of decoded weight rows: every tile of both kernels has the same bits, and fits."""

from __future__ import annotations

import itertools
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from compiled_mtp.ops import left_config, left_large_m, left_launch, left_product
from compiled_mtp.ops.blocks import KINDS, pack, pack_scales
from compiled_mtp.ops.counters import zero_counters
from compiled_mtp.ops.int4 import dequantize, pack_groups
from compiled_mtp.ops.int4 import pack as pack_int4
from compiled_mtp.ops.left_config import (
    LargeMTile,
    LeftForm,
    LeftTile,
    few_rows_tile,
    form_of_kind,
    hopper_tile,
    large_m_tile,
    left_tile,
    share_tasks,
)
from compiled_mtp.ops.left_large_m import launch_left_large_m
from compiled_mtp.ops.left_launch import launch_left_product
from compiled_mtp.ops.left_operand import LeftWeight
from compiled_mtp.ops.left_product import launch_left
from compiled_mtp.ops.linear_w4a16.kernel import left_weight
from tests.ops.left_on_cpu import HOPPER, put_on_cpu
from tests.ops.test_linear_blocks import random_fields

# The smallest shared memory of a supported GPU.
SMALL = replace(HOPPER, arch="sm_86", shared_bytes=99 * 1024)
INT4 = {f"int4 g{128 // groups}": groups for groups in (1, 2, 4)}
NAMES = (*KINDS, *INT4)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    put_on_cpu(monkeypatch)


def form_named(name: str) -> LeftForm:
    if name in INT4:
        return LeftForm("INT4", 32, 32, 0, INT4[name], 4 // INT4[name])
    return form_of_kind(name)


def random_weight(name: str, n: int, k: int) -> LeftWeight:
    if name in INT4:
        size = (n, k // 128 * INT4[name])
        groups = pack_groups((torch.rand(size) * 0.02).bfloat16(), torch.randint(0, 17, size))
        return left_weight(pack_int4(torch.randint(0, 16, (n, k), dtype=torch.uint8)), groups)
    kind = KINDS[name]
    codes = torch.randint(0, 1 << kind.bits, (n, k), dtype=torch.uint8)
    factor = torch.rand(n) if kind.has_factor else None
    scales = pack_scales(random_fields(kind, n, k // 128), kind, factor)
    return LeftWeight(pack(codes, kind), scales.view(-1).view(torch.int32), form_of_kind(name))


def rows_in_nan(rows: int, k: int) -> torch.Tensor:
    """Rows with NaN around them, at a stride that tiles can be moved from."""
    x = torch.full((rows + 2, k + 16), float("nan"), dtype=torch.bfloat16)[1 : rows + 1, :k]
    return x.copy_(torch.randn(rows, k))


# Chunks that do not divide the units, tiles that divide neither the rows nor the weight's, and one stage more
# than there are units.
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("gated", [False, True])
def test_every_tile_of_both_kernels_has_the_same_bits(name: str, gated: bool) -> None:
    n, units, split, rows = (96, 3, 1, 41) if gated else (80, 5, 2, 41)
    x, weight = rows_in_nan(rows, 128 * units * split), random_weight(name, n, 128 * units * split)
    whole = launch_left(LeftTile(8, 32, 2, 2, 3), x, weight, split, torch.float32, gated)
    assert whole.shape == (split, rows, n // 2 if gated else n)
    assert whole.isfinite().all()
    for tile in (LeftTile(16, 128, 4, 1, 4), LeftTile(32, 64, 4, 3, 3)):
        assert torch.equal(launch_left(tile, x, weight, split, torch.float32, gated), whole), tile
    for large in (
        LargeMTile(8, 2, 232, 3, 2, 0),
        LargeMTile(16, 3, 152, 2, 4, 0),
        LargeMTile(32, 2, 232, 4),
        LargeMTile(64, 2, 232, 2),
    ):
        assert torch.equal(launch_left_large_m(large, x, weight, split, torch.float32, gated), whole), large


# Of chunks that do not divide the units the last is short.
@pytest.mark.parametrize("name", ["NVFP4", "Q6_K", "int4 g128"])
@pytest.mark.parametrize(("processors", "gated"), [(2, True), (4, False)])
def test_tasks_that_programs_cut_have_the_same_bits(
    name: str, processors: int, gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = replace(HOPPER, num_processors=processors)
    monkeypatch.setattr(left_large_m, "device_of", lambda index: own)
    monkeypatch.setattr(left_config, "CUT_CYCLES", (0, 0))
    n, units, split, rows = (544, 3, 1, 9) if gated else (272, 5, 2, 9)
    x, weight = rows_in_nan(rows, 128 * units * split), random_weight(name, n, 128 * units * split)
    whole = launch_left(LeftTile(8, 32, 2, 2, 3), x, weight, split, torch.float32, gated)
    for tile in (
        LargeMTile(16, 2, 232, 3),
        LargeMTile(16, 2, 232, 2, 2, 1),
        LargeMTile(16, 2, 232, 2, 2, 0),
    ):
        assert share_tasks(tile, rows, n, split, units, processors).programs == processors
        got = launch_left_large_m(tile, x, weight, split, torch.float32, gated)
        assert torch.equal(got, whole), tile
        assert not zero_counters(x.device).any()


# Programs that begin and end within a task, and one with more than two tasks; chunks that do not divide the
# units.
@pytest.mark.parametrize("name", ["NVFP4", "Q4_K", "Q6_K", "int4 g128"])
@pytest.mark.parametrize(("programs", "gated"), [(4, True), (5, False)])
def test_shares_of_few_rows_have_the_same_bits(
    name: str, programs: int, gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = replace(HOPPER, num_processors=1)
    monkeypatch.setattr(left_product, "device_of", lambda index: own)
    n, units, split, rows = (160, 5, 1, 9) if gated else (80, 3, 2, 9)
    x, weight = rows_in_nan(rows, 128 * units * split), random_weight(name, n, 128 * units * split)
    whole = launch_left(LeftTile(8, 32, 2, 2, 3), x, weight, split, torch.float32, gated)
    for tile in (LeftTile(8, 32, 2, 2, 3), LeftTile(16, 32, 2, 1, 4)):
        shared = replace(tile, per_processor=programs)
        assert programs < -(-rows // tile.block_m) * -(-n // tile.block_n) * split
        got = launch_left(shared, x, weight, split, torch.float32, gated)
        assert torch.equal(got, whole), tile
        assert not zero_counters(x.device).any()


def test_a_program_begins_its_first_task_at_chunk_0() -> None:
    """So it waits for no other program before it has waited for the kernel before it."""
    for length, tasks in itertools.product((1, 2, 5, 17, 40), (2, 3, 7, 133, 544, 1088)):
        for programs in {1, tasks // 2, tasks - 1, min(tasks - 1, 528)}:
            share, more = divmod(tasks * length, programs)
            begins = [program * share + min(program, more) for program in range(programs)]
            for begin, end in zip(begins, [*begins[1:], tasks * length], strict=True):
                assert (end - 1) // length * length >= begin


@pytest.mark.parametrize("gated", [False, True])
def test_each_number_of_rows_has_the_same_bits_in_the_kernel_that_is_chosen(
    gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = replace(HOPPER, num_processors=1)
    monkeypatch.setattr(left_launch, "device_of", lambda index: few)
    monkeypatch.setattr(left_config, "FEW_ROWS_TASKS", 1)
    launched = []

    def launch(tile: LargeMTile, *args: Any) -> torch.Tensor:
        launched.append(tile.block_m)
        return launch_left_large_m(tile, *args)

    monkeypatch.setattr(left_launch, "launch_left_large_m", launch)
    n, units = 144, 5
    x, weight = rows_in_nan(33, 128 * units), random_weight("int4 g128", n, 128 * units)
    whole = launch_left(LeftTile(8, 32, 2, 2, 3), x, weight, 1, torch.bfloat16, gated)
    for rows in range(1, 34):
        got = launch_left_product(x[:rows], weight, 1, torch.bfloat16, gated)
        assert torch.equal(got, whole[:, :rows]), rows
    assert launched == [8] * 8 + [16] * 8 + [32] * 16 + [64]


@pytest.mark.parametrize(
    ("name", "n", "split", "heights"),
    [
        ("int4 g128", 34816, 1, (8, 16)),
        ("int4 g32", 18432, 1, (8, 16)),
        ("int4 g128", 16384, 1, (None, 16)),
        ("NVFP4", 34816, 1, (None, None)),
        ("NVFP4", 16384, 1, (None, 16)),
        ("int4 g128", 10240, 1, (None, 16)),
        ("int4 g128", 8192, 1, (None, None)),
        ("int4 g128", 34816, 8, (None, None)),
        ("Q4_K", 34816, 1, (None, None)),
    ],
)
def test_few_rows_take_the_kernel_that_was_faster(
    name: str, n: int, split: int, heights: tuple[int | None, ...]
) -> None:
    for height, rows in zip(heights, ((1, 8), (9, 16)), strict=True):
        for count in rows:
            tile = few_rows_tile(count, n, split, form_named(name))
            assert (tile and tile.block_m) == height, count


# 27B's gate and up, qkvz, down and out, and 4B's gate and up, on an H200.
@pytest.mark.parametrize(
    ("name", "rows", "n", "split", "tile"),
    [
        # 544 tasks are 4.12 for each processor: five take a fifth longer than equal shares.
        ("Q4_K", 4, 34816, 1, LeftTile(8, 64, 4, 2, 3, per_processor=4)),
        ("Q4_K", 16, 34816, 1, LeftTile(16, 64, 4, 2, 3, per_processor=4)),
        ("Q6_K", 16, 34816, 1, LeftTile(16, 64, 2, 1, 4, per_processor=4)),
        ("Q4_K", 4, 18432, 1, LeftTile(8, 64, 4, 2, 3, per_processor=2)),
        # 640 tasks are 4.85: five of Q4_K fit at once, of Q6_K only four.
        ("Q4_K", 4, 5120, 8, LeftTile(8, 64, 4, 2, 3)),
        ("Q6_K", 4, 5120, 8, LeftTile(8, 64, 4, 2, 3, per_processor=4)),
        ("Q4_K", 16, 5120, 8, LeftTile(16, 64, 2, 1, 4)),
        ("Q4_K", 16, 2560, 8, LeftTile(16, 64, 4, 2, 3)),
        ("Q4_K", 32, 5120, 8, LeftTile(32, 64, 4, 1, 4)),
        # 512 tasks of 32 weight rows fit at once if a code has four bits.
        ("Q4_K", 4, 16384, 1, LeftTile(8, 32, 2, 4, 3)),
        ("Q6_K", 4, 16384, 1, LeftTile(8, 64, 4, 2, 3)),
        ("Q6_K", 4, 1024, 1, LeftTile(8, 32, 2, 4, 3)),
        ("Q4_K", 16, 16384, 1, LeftTile(16, 64, 4, 2, 3)),
        ("Q6_K", 16, 16384, 1, LeftTile(16, 64, 4, 2, 3)),
        ("Q4_K", 16, 1024, 1, LeftTile(16, 32, 2, 1, 4)),
    ],
)
def test_few_rows_take_the_tile_that_was_faster(
    name: str, rows: int, n: int, split: int, tile: LeftTile
) -> None:
    gated = n > 16384
    assert left_tile(rows, n, split, gated, form_named(name), HOPPER) == tile
    # Only Hopper was timed with tasks that programs cut.
    other = replace(HOPPER, arch="sm_100")
    assert left_tile(rows, n, split, gated, form_named(name), other) == replace(tile, per_processor=0)


# K splits of 27B's down and out.
@pytest.mark.parametrize(
    ("name", "units", "tile"),
    [
        ("Q6_K", 17, LeftTile(32, 64, 4, 1, 4)),
        ("Q6_K", 6, LeftTile(32, 64, 4, 1, 4)),
        ("NVFP4", 17, None),
        ("NVFP4", 6, LeftTile(32, 64, 4, 2, 2)),
    ],
)
def test_k_splits_of_32_rows_take_the_kernel_that_was_faster(
    name: str, units: int, tile: LeftTile | None
) -> None:
    form = form_named(name)
    for rows in (17, 32):
        large = hopper_tile(rows, 5120, 8, units, form)
        assert (large is None) == (tile is not None)
        assert large or left_tile(rows, 5120, 8, False, form, HOPPER) == tile
    assert hopper_tile(33, 5120, 8, units, form)


@pytest.mark.parametrize("rows", [17, 32, 64, 128, 512])
@pytest.mark.parametrize(("n", "split"), [(34816, 1), (16384, 1), (5120, 8), (2048, 4), (48, 1)])
def test_programs_share_all_chunks_of_all_tasks(rows: int, n: int, split: int) -> None:
    for form, units in product((form_of_kind("Q4_K"), form_named("int4 g128")), (1, 6, 17, 40)):
        tile = large_m_tile(rows, n, split, units, form)
        shares = share_tasks(tile, rows, n, split, units, 132)
        tasks = -(-n // (64 * tile.groups)) * -(-rows // tile.block_m) * split
        length = -(-units // tile.chunk)
        assert (shares.programs * shares.share + shares.more) * shares.unit == tasks * length
        # A program waits for one other at most, which begins with the task that they share.
        assert shares.unit == length or shares.share >= length


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_whole_numbers_have_exact_sums(groups: int, dtype: torch.dtype) -> None:
    n, k, rows = 48, 384, 19
    size = (n, k // 128 * groups)
    codes, zeros = torch.randint(0, 16, (n, k), dtype=torch.uint8), torch.randint(0, 17, size)
    words = pack_int4(codes), pack_groups((2.0 ** torch.randint(-3, 3, size)).to(dtype), zeros)
    x = torch.randint(-4, 5, (rows, k)).bfloat16()
    exact = x.float() @ dequantize(*words).T
    weight = left_weight(*words)
    assert torch.equal(launch_left(LeftTile(8, 64, 4, 1, 3), x, weight, 1, torch.float32)[0], exact)
    large = launch_left_large_m(LargeMTile(32, 2, 232, 3), x, weight, 1, torch.float32)
    assert torch.equal(large[0], exact)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("split", "gated"), [(1, False), (1, True), (8, False)])
def test_tiles_fit(name: str, split: int, gated: bool) -> None:
    form = form_named(name)
    for rows, n in product((1, 9, 17, 33, 65, 4096), (16, 48, 5120, 34816)):
        for device in (HOPPER, SMALL):
            tile = left_tile(rows, n, split, gated, form, device)
            assert tile.shared_bytes(form) <= device.shared_bytes, (rows, n)
            assert tile.block_n % (16 * tile.num_warps) == 0, (rows, n)
        large = hopper_tile(rows, n, split, 17, form)
        assert large is None or large.shared_bytes(form) <= 227 * 1024 - 2048, (rows, n)
