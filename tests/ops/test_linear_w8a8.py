"""quantize_rows and linear_w8a8: FP8 weights times activations in groups of 128."""

from __future__ import annotations

import itertools

import pytest
import torch

from compiled_mtp.ops.fp8 import dequantize
from compiled_mtp.ops.k_splits import add_tree, part_counts
from compiled_mtp.ops.linear_w8a8 import linear_w8a8, linear_w8a8_partials
from compiled_mtp.ops.quantize_rows import quantize_rows
from tests.ops.harness import (
    assert_same_bits,
    check_compiles,
    check_launch,
    check_row_invariance,
    poisoned_allocations,
    rel_l2,
)
from tests.ops.test_compile import finish, start_compiler

Quantised = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def make(rows: int, n: int, k: int) -> Quantised:
    """Return quantised rows and a weight in blocks, with their scales."""
    x, x_scale = quantize_rows(torch.randn(rows, k).bfloat16())
    scale = torch.rand(-(-n // 128), k // 128) * 0.01 + 0.001
    return x, x_scale, (torch.randn(n, k) * 40).to(torch.float8_e4m3fn), scale


def exact(x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    values = x.double() * x_scale.double().repeat_interleave(128, 1)
    return values @ dequantize(weight, scale).double().T


def test_a_group_depends_on_no_other() -> None:
    x = torch.randn(5, 384).bfloat16()
    x[1, :128] = 0.0
    x[2, 130] = 3e38
    x[3] *= 1e-30
    values, scale = quantize_rows(x)
    assert values.dtype == torch.float8_e4m3fn
    assert scale.shape == (5, 3)
    back = values.float() * scale.repeat_interleave(128, 1)
    step = x.float().view(5, 3, 128).abs().amax(-1) * 2.0**-4
    assert ((back - x.float()).abs().view(5, 3, 128) <= step[..., None] + 1e-12).all()
    assert rel_l2(back[0], x[0]) < 0.03
    assert (back[1, :128] == 0).all()
    check_row_invariance(lambda m: quantize_rows(x[:m]), range(1, 5), 5)
    for group in range(3):
        alone = quantize_rows(x[:, group * 128 : (group + 1) * 128])
        assert torch.equal(alone[0].view(torch.uint8), values.view(torch.uint8)[:, group * 128 :][:, :128])


def test_quantized_rows_compile_and_refuse() -> None:
    cases = [(torch.randn(m, 256, dtype=dtype),) for m in (3, 5) for dtype in (torch.bfloat16, torch.float32)]
    torch.library.opcheck(quantize_rows.overload, cases[0])
    check_compiles(quantize_rows, cases)
    with pytest.raises(ValueError, match="x must have a multiple of 128 columns, got 72"):
        quantize_rows(torch.zeros(2, 72).bfloat16())
    with pytest.raises(ValueError, match="x must have dtype"):
        quantize_rows(torch.zeros(2, 128).half())


@pytest.mark.parametrize("columns", [128, 1280])
def test_quantize_rows_in_interpreter(interpreter: None, columns: int) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        wide = torch.randn(3, columns + 8, dtype=dtype)
        wide[:, columns:] = float("nan")
        wide[1, :128] = 0.0
        with poisoned_allocations():
            got = quantize_rows.launch(wide[:, :columns])
        assert_same_bits(got, quantize_rows.reference(wide[:, :columns]))


def nearest_quotients() -> list[tuple[int, int]]:
    """Return every V and S of 24 bits whose quotient is within 2**-45 of a number halfway between two float32
    numbers, one of which is halfway between two e4m3 numbers.

    Such a number is odd / 2**j, so that V * 2**j - odd * S is at most 16: each difference has one S. Before
    its last rounding the kernel's quotient is within 2**-46 of the true one, so every other quotient gives
    the e4m3 number of a division.
    """
    pairs = []
    for middle in range(16, 32):
        nearest = (2**24 + 1, 2**25 - 1) if middle == 16 else (2**20 * middle + 1, 2**20 * middle - 1)
        for odd, distance, j in itertools.product(nearest, range(-16, 17), (24, 25)):
            divisor = distance * pow(odd, -1, 2**j) % 2**j
            value = (odd * divisor - distance) >> j
            if 2**23 <= divisor < 2**24 and 2**23 <= value < 2**24:
                pairs.append((value, divisor))
    return pairs


def test_quotients_next_to_a_middle_are_those_of_a_division(interpreter: None) -> None:
    rows = []
    for value, factor in nearest_quotients():
        # Groups whose factor this is; some factors have none.
        near = torch.tensor(448.0 * factor) + torch.arange(-4, 5) * 512.0
        for largest in near[near * (1 / 448) == factor]:
            rows.append(torch.cat((largest[None], value * 2.0 ** torch.arange(-12.0, 8.0), torch.zeros(107))))
    assert len(rows) > 100
    x = torch.stack(rows)
    assert_same_bits(quantize_rows.launch(x), quantize_rows.reference(x))


@pytest.mark.filterwarnings("ignore:invalid value")
def test_quotients_are_rounded_once(interpreter: None) -> None:
    """The kernel's quotients are those of a division: next to the middles between two e4m3 numbers, of zeros
    with either sign, of the smallest and largest numbers, and of finite numbers beside an infinity.
    """
    every = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (every[1:] + every[:-1]) / 2
    largest = torch.cat((torch.rand(40) * 2.0 ** torch.arange(-20, 20), torch.tensor([1e-10, 3e-11, 3e38])))
    scale = largest.clamp(min=1e-10) * (1 / 448)
    x = middles * scale[:, None]
    for near in (x, x.nextafter(torch.tensor(0.0)), x.nextafter(torch.tensor(torch.inf))):
        rows = torch.cat((largest[:, None], torch.zeros(len(x), 1), near), 1)
        rows[:, 2::2] *= -1
        rows[:, 1] = -0.0
        assert_same_bits(quantize_rows.launch(rows), quantize_rows.reference(rows))
    odd = torch.tensor([torch.inf, 1.0, -3e38, -0.0, 0.0, 1e-45, -1e-38, 3.4e38]).repeat(16)[None]
    got, factor = quantize_rows.launch(odd)
    is_finite = odd.isfinite()
    assert factor.item() == torch.inf
    assert got[~is_finite].float().isnan().all()
    assert_same_bits([got[is_finite]], [quantize_rows.reference(odd)[0][is_finite]])


@pytest.mark.parametrize("n, k", [(130, 256), (40, 1024)])
def test_equals_float64(n: int, k: int) -> None:
    args = make(5, n, k)
    wanted = exact(*args)
    assert rel_l2(linear_w8a8(*args), wanted) < 2 * rel_l2(wanted.bfloat16(), wanted)
    for count in part_counts(k, k):
        parts = linear_w8a8_partials(*args, count)
        assert rel_l2(add_tree(linear_w8a8_partials.reference(*args, count)), wanted) < 2e-3
        assert torch.equal(add_tree(parts).bfloat16(), linear_w8a8_partials(*args, 1)[0])


@pytest.mark.parametrize("rows", [1, 5, 8])
def test_a_cpu_gives_fp8_and_dequantized_weights_the_same_bits(rows: int) -> None:
    """Float32 results lie within 1e-6 of float64, with the same bits for every number of rows."""
    x, x_scale, weight, scale = make(8, 130, 1024)
    wanted = exact(x, x_scale, weight, scale)
    args = (x[:rows], x_scale[:rows])
    values = dequantize(weight, scale)
    for product in (linear_w8a8, lambda *a, **k: linear_w8a8_partials(*a, 1, **k)[0]):
        whole = product(x, x_scale, weight, scale, out_float32=True)
        assert whole.dtype == torch.float32
        assert rel_l2(whole, wanted) < 1e-6
        assert torch.equal(product(*args, weight, scale, out_float32=True), whole[:rows])
        assert torch.equal(product(*args, values, None, out_float32=True), whole[:rows])
        rounded = product(*args, values.bfloat16(), None)
        assert rounded.dtype == torch.bfloat16
        assert rel_l2(rounded, wanted[:rows]) < 5e-3


def test_errs_as_the_quantised_activations_do() -> None:
    """Compared with float64 on the given values, e4m3 activations cost 2.6 % and the product nothing."""
    x, weight = torch.randn(8, 1024).bfloat16(), (torch.randn(256, 1024) * 40).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 8) * 0.01 + 0.001
    wanted = x.double() @ dequantize(weight, scale).double().T
    error = rel_l2(linear_w8a8(*quantize_rows(x), weight, scale), wanted)
    assert 0.02 < error < 0.03


def test_products_compile_and_refuse() -> None:
    cases = [make(m, 40, 256) for m in (3, 5)]
    # opcheck's schema test cannot compare e4m3.
    kinds = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(linear_w8a8.overload, (*cases[0], False), test_utils=kinds)
    check_compiles(linear_w8a8, cases)
    torch.library.opcheck(linear_w8a8_partials.overload, (*cases[0], 2, 0, False, False), test_utils=kinds)
    check_compiles(linear_w8a8_partials, [(*case, 2) for case in cases])
    x, x_scale, weight, scale = cases[0]
    with pytest.raises(ValueError, match=r"count must be one of \(1, 2\) for this weight, got 4"):
        linear_w8a8_partials(x, x_scale, weight, scale, 4)
    with pytest.raises(ValueError, match="x_scale must have shape"):
        linear_w8a8(x, x_scale[:, :1], weight, scale)
    with pytest.raises(ValueError, match="weight must have dtype"):
        linear_w8a8(x, x_scale, weight.half(), scale)
    with pytest.raises(ValueError, match="weight_scale must be None unless the weight is FP8"):
        linear_w8a8(x, x_scale, weight.bfloat16(), scale)
    with pytest.raises(ValueError, match="weight_scale must be given for an FP8 weight"):
        linear_w8a8(x, x_scale, weight, None)
    with pytest.raises(ValueError, match="x must have a multiple of 128 columns, got 72; use linear"):
        linear_w8a8(x[:, :72], x_scale[:, :0], weight[:, :72], scale[:, :0])


@pytest.mark.parametrize("rows, n, k", [(3, 130, 384), (20, 64, 256), (40, 130, 256), (70, 64, 256)])
def test_kernel_in_interpreter(interpreter: None, rows: int, n: int, k: int) -> None:
    check_launch(linear_w8a8, make(rows, n, k), rtol=8e-3, atol=1e-4)
    check_launch(linear_w8a8, (*make(rows, n, k), True), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows, k", [(3, 1024), (20, 1024), (70, 512)])
def test_programs_have_the_same_bits(interpreter: None, rows: int, k: int) -> None:
    """1, 2, 4 and 8 programs add the K splits, of the whole and of a half."""
    args = make(rows, 130, k)
    wanted = linear_w8a8_partials.launch(*args, 1)[0]
    whole = part_counts(k, k)[-1]
    check_launch(linear_w8a8_partials, (*args, whole), rtol=1e-4, atol=1e-4)
    for count in part_counts(k, k):
        parts = linear_w8a8_partials.launch(*args, count)
        assert parts.dtype == (torch.bfloat16 if count == 1 else torch.float32)
        assert torch.equal(add_tree(parts).bfloat16(), wanted), f"{count} programs"
        stacked = linear_w8a8_partials.launch(*args, count, stacked=True)
        assert stacked.dtype == torch.float32
        assert torch.equal(stacked.view(parts.shape).to(parts.dtype), parts)
    x, x_scale, weight, scale = args
    blocks = k // 256
    half = (x[:, : k // 2], x_scale[:, :blocks], weight[:, : k // 2], scale[:, :blocks])
    left = add_tree(linear_w8a8_partials.launch(*half, 2, k))
    assert torch.equal(left, add_tree(linear_w8a8_partials.launch(*args, whole)[: whole // 2]))


@pytest.mark.kernels
@pytest.mark.timeout(600)
def test_one_class_of_instruction() -> None:
    """Every tile multiplies by QGMMA: another class sums in another order, and rows would differ."""
    table = finish(start_compiler([90], ["linear_w8a8", "moe_experts"], "--products"))
    w8a8 = {key: products for key, products in table.items() if "w8a8" in key.partition("-")[0]}
    kernels = {"linear_w8a8/linear_w8a8", "linear_w8a8/large_m_w8a8", "linear_w8a8/persistent"}
    kernels |= {"moe_experts/gate_up_w8a8", "moe_experts/down_w8a8"}
    assert {key.partition("-")[0] for key in w8a8} == kernels
    for key, products in w8a8.items():
        assert set(products) == {"QGMMA"}, f"{key}: {products}"
