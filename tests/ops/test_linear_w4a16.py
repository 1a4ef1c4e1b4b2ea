"""linear_w4a16: four-bit weights, exact codes, scales after the sums, row-invariant."""

from __future__ import annotations

import pytest
import torch

from compiled_mtp.ops.int4 import dequantize, pack, pack_groups, unpack, unpack_groups
from compiled_mtp.ops.k_splits import add_tree, count_k_splits
from compiled_mtp.ops.linear_w4a16 import linear_w4a16, linear_w4a16_partials, linear_w4a16_silu_mul
from compiled_mtp.ops.linear_w4a16.kernel import values_of
from compiled_mtp.ops.silu_mul import silu_mul
from tests.ops.harness import check_launch, check_registration, check_row_invariance
from tests.ops.left_on_cpu import put_on_cpu

Weight = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    put_on_cpu(monkeypatch)


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
@pytest.mark.usefixtures("on_cpu")
def test_kernels_on_a_cpu(group: int, rows: int) -> None:
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


@pytest.mark.usefixtures("on_cpu")
def test_rows_do_not_depend_on_their_number_on_a_cpu() -> None:
    weight, scale = four_bits(96, 256)
    x = torch.randn(129, 256).bfloat16()
    sizes = (1, 16, 17, 64, 65, 128)
    check_row_invariance(lambda rows: linear_w4a16.launch(x[:rows], weight, scale, True), sizes, 129)
    gated = linear_w4a16_silu_mul.launch
    check_row_invariance(lambda rows: gated(x[:rows], weight, scale), sizes, 129)


@pytest.mark.usefixtures("on_cpu")
def test_programs_and_shards_have_the_same_bits_on_a_cpu() -> None:
    n, k = 64, 1024
    weight, scale = four_bits(n, k)
    x = torch.randn(5, k).bfloat16()
    assert count_k_splits(k) == 8
    whole = linear_w4a16_partials.launch(x, weight, scale, 1)[0]
    for count in (2, 4, 8):
        partials = linear_w4a16_partials.launch(x, weight, scale, count)
        assert torch.equal(add_tree(partials).bfloat16(), whole)
    halves = [
        linear_w4a16_partials.launch(
            x[:, own].contiguous(), pack(unpack(weight)[:, own]), scale[groups].contiguous(), 1, k
        )[0]
        for own, groups in ((slice(0, 512), slice(0, 4)), (slice(512, 1024), slice(4, 8)))
    ]
    assert torch.equal((halves[0] + halves[1]).bfloat16(), whole)
    rows = linear_w4a16.launch(x, weight[:32], scale[:, :32].contiguous())
    assert torch.equal(rows, linear_w4a16.launch(x, weight, scale)[:, :32])


@pytest.mark.usefixtures("on_cpu")
def test_gate_and_up_are_those_of_two_launches_on_a_cpu() -> None:
    weight, scale = four_bits(64, 256)
    x = torch.randn(5, 256).bfloat16()
    y = linear_w4a16_silu_mul.launch(x, weight, scale)
    assert torch.equal(y, silu_mul.launch(linear_w4a16.launch(x, weight, scale)))


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
