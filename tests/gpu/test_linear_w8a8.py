"""quantize_rows and linear_w8a8 on the device: exact enough, with bits independent of rows and programs."""

from __future__ import annotations

import pytest
import torch

from compiled_mtp.ops.fp8 import dequantize
from compiled_mtp.ops.k_splits import part_counts
from compiled_mtp.ops.linear_w8a8 import linear_w8a8, linear_w8a8_partials
from compiled_mtp.ops.quantize_rows import quantize_rows
from compiled_mtp.ops.rms_norm import add_rms_norm, add_rms_norm_quantized
from compiled_mtp.ops.silu_mul import silu_mul, silu_mul_quantized
from tests.ops.harness import assert_same_bits, check_row_invariance, rel_l2

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
        reason="needs a CUDA device with FP8 products",
    ),
]

SHAPES = [(5120, 6144), (2560, 9216), (1024, 3584), (34816, 5120), (300, 256)]


def make(rows: int, n: int, k: int) -> tuple[torch.Tensor, ...]:
    x, x_scale = quantize_rows(torch.randn(rows, k, device="cuda").bfloat16())
    scale = torch.rand(-(-n // 128), k // 128, device="cuda") * 0.01 + 0.001
    return x, x_scale, (torch.randn(n, k, device="cuda") * 40).to(torch.float8_e4m3fn), scale


@pytest.mark.parametrize("columns", [128, 2560, 17408])
def test_quantised_rows_have_the_bits_of_the_reference(columns: int) -> None:
    wide = torch.randn(257, columns + 8, device="cuda").bfloat16() * 3
    wide[1, :128] = 0.0
    wide[2] *= 1e-30
    x = wide[:, :columns]
    assert_same_bits(quantize_rows(x), quantize_rows.reference(x))
    check_row_invariance(lambda m: quantize_rows(x[:m]), range(1, 257), 257)


def test_quotients_of_all_numbers_are_those_of_a_division() -> None:
    """Every finite number in bfloat16, in groups of many factors."""
    bits = torch.arange(1 << 16, device="cuda", dtype=torch.int32).to(torch.int16)
    every = bits.view(torch.bfloat16)
    every = every[every.isfinite()].view(-1, 120)
    random = torch.Generator("cuda").manual_seed(1)
    for power in range(-60, 120, 4):
        largest = (1 + torch.rand(len(every), 1, device="cuda", generator=random)) * 2.0**power
        x = torch.cat((largest.expand(-1, 8), torch.where(every.abs() <= largest, every, 0.0)), 1)
        for rows in (x, x.bfloat16()):
            assert_same_bits(quantize_rows(rows), quantize_rows.reference(rows))


@pytest.mark.parametrize("n, k", SHAPES)
def test_errs_little_more_than_its_rounding(n: int, k: int) -> None:
    x, x_scale, weight, scale = make(200, n, k)
    exact = x.double() * x_scale.double().repeat_interleave(128, 1) @ dequantize(weight, scale).double().T
    error = rel_l2(linear_w8a8(x, x_scale, weight, scale), exact)
    rounding = rel_l2(exact.bfloat16(), exact)
    assert error < 4 * rounding, f"{error:.2e}, of which rounding {rounding:.2e}"


@pytest.mark.parametrize("n, k", SHAPES)
def test_bits_of_a_row_do_not_depend_on_the_number_of_rows(n: int, k: int) -> None:
    x, x_scale, weight, scale = make(300, n, k)
    check_row_invariance(lambda m: linear_w8a8(x[:m], x_scale[:m], weight, scale), range(1, 257), 300)


@pytest.mark.parametrize("n, k", [(34816, 5120), (16384, 5120), (5120, 17408), (2560, 9216)])
def test_descriptors_change_no_bit(n: int, k: int) -> None:
    """Rows that do not begin at multiples of 16 bytes use the other kernel, and so do few rows."""
    x, x_scale, weight, scale = make(1024, n, k)
    unaligned = torch.empty(1024, k + 1, dtype=x.dtype, device="cuda")[:, 1:].copy_(x)
    wanted = linear_w8a8(unaligned, x_scale, weight, scale)
    parts = linear_w8a8_partials(unaligned, x_scale, weight, scale, 4)
    for rows in (1, 4, 16, 17, 32, 64, 65, 128, 129, 192, 256, 257, 512, 600, 1024):
        given = (x[:rows], x_scale[:rows], weight, scale)
        assert torch.equal(linear_w8a8(*given), wanted[:rows]), rows
        assert torch.equal(linear_w8a8_partials(*given, 4), parts[:, :rows]), rows


@pytest.mark.parametrize("n, k", SHAPES[:3])
def test_programs_have_the_same_bits(n: int, k: int) -> None:
    x, x_scale, weight, scale = make(512, n, k)
    residual = torch.randn(512, n, device="cuda").bfloat16()
    factor = torch.randn(n, device="cuda").bfloat16()

    def run(rows: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        parts = linear_w8a8_partials(x[:rows], x_scale[:rows], weight, scale, count)
        return add_rms_norm(parts, residual[:rows], factor, 1e-6)

    wanted = run(512, 1)
    for count in part_counts(k, k):
        for rows in (*range(1, 257), 257, 384, 385, 512):
            got = run(rows, count)
            same = all(torch.equal(a, b[:rows]) for a, b in zip(got, wanted, strict=True))
            assert same, f"{rows} rows, {count} programs"


@pytest.mark.parametrize("width", [2048, 5120])
def test_fused_quantisation_has_the_bits_of_two_launches(width: int) -> None:
    gate_up = torch.randn(67, 2 * width, device="cuda").bfloat16()
    assert_same_bits(silu_mul_quantized(gate_up), quantize_rows(silu_mul(gate_up)))
    parts, residual = torch.randn(4, 67, width, device="cuda"), torch.randn(67, width, device="cuda")
    args = (parts, residual.bfloat16(), torch.randn(width, device="cuda").bfloat16(), 1e-6)
    norm = add_rms_norm(*args)
    assert_same_bits(add_rms_norm_quantized(*args), (*norm, *quantize_rows(norm[0])))
