"""linear_w4a16: four-bit weights, exact codes, scales after the sums, row-invariant."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compiled_mtp.ops.device import Device
from compiled_mtp.ops.int4 import dequantize, pack, pack_groups, unpack, unpack_groups
from compiled_mtp.ops.k_splits import add_tree, count_k_splits
from compiled_mtp.ops.linear_w4a16 import (
    few_rows_kernel,
    linear_w4a16,
    linear_w4a16_partials,
    linear_w4a16_silu_mul,
)
from compiled_mtp.ops.linear_w4a16.config import FewRowsTile, W4A16Config, configuration, few_rows_tile
from compiled_mtp.ops.linear_w4a16.few_rows_kernel import launch_few_rows, w4a16_few_rows_kernel
from compiled_mtp.ops.linear_w4a16.kernel import launch_config, values_of
from compiled_mtp.ops.silu_mul import silu_mul
from tests.ops import gluon_on_cpu
from tests.ops.harness import check_launch, check_registration, check_row_invariance

Weight = tuple[torch.Tensor, torch.Tensor]


def four_bits(n: int, k: int, group: int = 128, dtype: torch.dtype = torch.float16) -> Weight:
    """A random weight, packed."""
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    scales = (torch.rand(n, k // group) * 0.02 + 0.001).to(dtype)
    zeros = torch.randint(0, 16, (n, k // group), dtype=torch.uint8)
    return pack(codes), pack_groups(scales, zeros)


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_packing_is_reversed_and_keeps_every_value(group: int, dtype: torch.dtype) -> None:
    n, k = 48, 384
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    scales = torch.randn(n, k // group).to(dtype)
    zeros = torch.randint(0, 16, (n, k // group), dtype=torch.uint8)
    words, groups = pack(codes), pack_groups(scales, zeros)
    assert torch.equal(unpack(words), codes)
    found_scales, found_zeros = unpack_groups(groups)
    assert torch.equal(found_scales, scales)
    assert torch.equal(found_zeros, zeros)
    exact = (codes.double() - zeros.double().repeat_interleave(group, 1)) * scales.double().repeat_interleave(
        group, 1
    )
    assert torch.equal(dequantize(words, groups).double(), exact)


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("rows", [1, 5, 33])
def test_kernels_in_interpreter(group: int, rows: int) -> None:
    weight, scale = four_bits(80, 256, group, torch.bfloat16 if rows == 5 else torch.float16)
    x = torch.randn(rows, 256).bfloat16()
    check_launch(linear_w4a16, (x, weight, scale, True), rtol=1e-4, atol=1e-4)
    check_launch(linear_w4a16, (x, weight, scale), rtol=1e-2, atol=1e-3)
    check_launch(linear_w4a16_partials, (x, weight, scale, 2), rtol=1e-4, atol=1e-4)
    check_launch(linear_w4a16_partials, (x, weight, scale, 2, 0, False, True), rtol=1e-4, atol=1e-4)
    check_launch(linear_w4a16_silu_mul, (x, weight[:64], scale[:, :64].contiguous()), rtol=2e-2, atol=1e-2)


def test_a_prompt_is_multiplied_by_values_rounded_once_in_interpreter() -> None:
    weight, scale = four_bits(80, 256, 64)
    values = values_of(weight, scale)
    assert torch.equal(values, dequantize(weight, scale).bfloat16())
    x = torch.randn(70, 256).bfloat16()
    y = linear_w4a16.launch(x, weight, scale, True, True)
    torch.testing.assert_close(y.double(), x.double() @ values.double().T, rtol=1e-4, atol=1e-4)
    sums = linear_w4a16_partials.launch(x, weight, scale, 1, 0, True)
    assert torch.equal(sums[0], linear_w4a16.launch(x, weight, scale, False, True))


def test_rows_do_not_depend_on_their_number_in_interpreter() -> None:
    weight, scale = four_bits(96, 256)
    x = torch.randn(129, 256).bfloat16()
    sizes = (1, 16, 17, 64, 65, 128)
    check_row_invariance(lambda rows: linear_w4a16.launch(x[:rows], weight, scale, True), sizes, 129)
    gated = linear_w4a16_silu_mul.launch
    check_row_invariance(lambda rows: gated(x[:rows], weight, scale), sizes, 129)


def test_programs_tiles_and_shards_have_the_same_bits_in_interpreter() -> None:
    n, k = 64, 1024
    weight, scale = four_bits(n, k)
    x = torch.randn(5, k).bfloat16()
    assert count_k_splits(k) == 8
    whole = linear_w4a16_partials.launch(x, weight, scale, 1)[0]
    for count in (2, 4, 8):
        partials = linear_w4a16_partials.launch(x, weight, scale, count)
        assert torch.equal(add_tree(partials).bfloat16(), whole)
    for tile in (W4A16Config(16, 1, 16, 2, 2), W4A16Config(16, 2, 32, 4, 3), W4A16Config(32, 1, 64, 4, 2)):
        assert torch.equal(launch_config(tile, x, weight, scale, 1, 8, torch.bfloat16)[0], whole)
    halves = [
        linear_w4a16_partials.launch(
            x[:, own].contiguous(), pack(unpack(weight)[:, own]), scale[groups].contiguous(), 1, k
        )[0]
        for own, groups in ((slice(0, 512), slice(0, 4)), (slice(512, 1024), slice(4, 8)))
    ]
    assert torch.equal((halves[0] + halves[1]).bfloat16(), whole)
    rows = linear_w4a16.launch(x, weight[:32], scale[:, :32].contiguous())
    assert torch.equal(rows, linear_w4a16.launch(x, weight, scale)[:, :32])


def test_gate_and_up_are_those_of_two_launches_in_interpreter() -> None:
    weight, scale = four_bits(64, 256)
    x = torch.randn(5, 256).bfloat16()
    y = linear_w4a16_silu_mul.launch(x, weight, scale)
    assert torch.equal(y, silu_mul.launch(linear_w4a16.launch(x, weight, scale)))


class OnCpu:
    """Launches the kernel of few rows on a CPU, with plain functions instead of inline assembly."""

    def __getitem__(self, grid: tuple[int, int]) -> Any:
        def launch(
            *args: Any, num_warps: int, launch_pdl: bool, enable_fp_fusion: bool, **given: Any
        ) -> None:
            named = dict(zip(w4a16_few_rows_kernel.arg_names, args, strict=False))
            gluon_on_cpu.run(w4a16_few_rows_kernel, grid, num_warps, INSTEAD, **named, **given)

        return launch


def decode_words(words: torch.Tensor, minus: torch.Tensor, index: int) -> torch.Tensor:
    """Bit field `index` of words, less the zero points."""
    return ((words.int() >> 4 * index & 15) + minus.float() + 128).bfloat16()


def scale_in(group: torch.Tensor, is_bf16: bool) -> torch.Tensor:
    """The scale in the low half of a group's word."""
    return group.to(torch.int16).view(torch.bfloat16 if is_bf16 else torch.float16).float()


INSTEAD = {
    "decode": decode_words,
    "scale_of": scale_in,
    "minus_of": lambda group: (group >> 16).to(torch.int16).view(torch.bfloat16),
}
HOPPER = Device("sm_90", 227 * 1024, True, True, 132)


# Units that no chunk divides, weight rows that no tile divides, one stage more than there are chunks.
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize(
    ("rows", "n", "units", "split", "tile"),
    [
        (1, 48, 3, 1, FewRowsTile(8, 32, 2, 2, 3)),
        (4, 80, 1, 8, FewRowsTile(8, 64, 2, 2, 3)),
        (8, 64, 5, 1, FewRowsTile(8, 32, 2, 4, 3)),
        (9, 96, 2, 2, FewRowsTile(16, 64, 2, 1, 4)),
        (16, 32, 7, 1, FewRowsTile(16, 64, 4, 2, 6)),
        (41, 48, 3, 1, FewRowsTile(32, 32, 2, 1, 3)),
    ],
)
@pytest.mark.parametrize("gated", [False, True])
def test_few_rows_have_the_sums_of_the_other_kernel(
    group: int, rows: int, n: int, units: int, split: int, tile: FewRowsTile, gated: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Whole numbers and powers of two, whose sums are exact; around the rows lies NaN."""
    k = 128 * units * split
    if gated:
        n, split = n // 32 * 32, 1
    monkeypatch.setattr(few_rows_kernel, "w4a16_few_rows_kernel", OnCpu())
    monkeypatch.setattr(few_rows_kernel, "device_of", lambda index: HOPPER)
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    zeros = torch.randint(0, 16, (n, k // group), dtype=torch.uint8)
    scales = 2.0 ** torch.randint(-3, 3, (n, k // group))
    weight, scale = pack(codes), pack_groups(scales.to(torch.bfloat16 if rows == 8 else torch.float16), zeros)
    x = torch.full((rows + 2, k + 16), float("nan"), dtype=torch.bfloat16)[1 : rows + 1, :k]
    x.copy_(torch.randint(-4, 5, x.shape))
    got = launch_few_rows(tile, x, weight, scale, split, torch.float32, gated)
    exact = x.float() @ dequantize(weight, scale).T
    if gated:
        gate, up = exact.chunk(2, -1)
        torch.testing.assert_close(got[0], gate * torch.sigmoid(gate) * up)
    else:
        assert got.shape == (split, rows, n)
        assert torch.equal(got.sum(0), exact)


@pytest.mark.parametrize("rows", [1, 8, 9, 16])
@pytest.mark.parametrize("n", [32, 1024, 5120, 16384, 34816])
@pytest.mark.parametrize(("split", "gated"), [(1, False), (1, True), (8, False)])
def test_tiles_of_few_rows_fit(rows: int, n: int, split: int, gated: bool) -> None:
    tile = few_rows_tile(rows, n, split, gated)
    assert tile.block_n % (16 * tile.num_warps) == 0
    assert not gated or tile.block_n == 32 * tile.num_warps
    # The smallest shared memory of a supported GPU.
    assert tile.num_stages * tile.chunk * (tile.block_n * 64 + (8 if rows <= 8 else 16) * 256) <= 99 * 1024


@pytest.mark.parametrize("rows", [1, 16, 17, 33, 4096])
@pytest.mark.parametrize("n", [16, 48, 1024, 34816])
@pytest.mark.parametrize("shared", [99, 163, 227])
def test_tiles_fit(rows: int, n: int, shared: int) -> None:
    tile = configuration(rows, n, 1, shared * 1024)
    assert tile.num_stages * tile.stage_bytes() <= shared * 1024
    assert tile.block_n <= n


def test_registration() -> None:
    weight, scale = four_bits(32, 256)
    x = torch.randn(3, 256).bfloat16()
    registered = torch.ops.compiled_mtp
    check_registration(registered.linear_w4a16.default, (x, weight, scale, False, False))
    check_registration(registered.linear_w4a16_silu_mul.default, (x, weight, scale))
    check_registration(registered.linear_w4a16_partials.default, (x, weight, scale, 1, 0, False, False))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(32, 65, dtype=torch.int16)}, r"^weight must have rows of 256 codes"),
        (
            {"weight_scale": torch.zeros(16, 32, 2, dtype=torch.float16)},
            r"^weight_scale must have groups of 32",
        ),
        ({"x": torch.zeros(3, 256)}, r"^x must be bfloat16|^x must have dtype"),
    ],
)
def test_errors_name_the_argument_that_does_not_fit(change: dict[str, torch.Tensor], message: str) -> None:
    weight, scale = four_bits(32, 256)
    given = {"x": torch.zeros(3, 256).bfloat16(), "weight": weight, "weight_scale": scale} | change
    with pytest.raises(ValueError, match=message):
        linear_w4a16(**given)
