"""linear_blocks: weights of scaled codes, values rounded once, row-invariant."""

from __future__ import annotations

import pytest
import torch

from compiled_mtp.ops.blocks import KINDS, UNIT, Kind, pack, pack_scales, products, unpack, unpack_scales
from compiled_mtp.ops.blocks import values as values_in_float32
from compiled_mtp.ops.k_splits import add_tree, count_k_splits
from compiled_mtp.ops.linear_blocks import (
    block_rows,
    linear_blocks,
    linear_blocks_partials,
    linear_blocks_silu_mul,
)
from compiled_mtp.ops.linear_blocks.values_kernel import values_of
from compiled_mtp.ops.silu_mul import silu_mul
from tests.ops.harness import check_launch, check_registration, check_row_invariance
from tests.ops.left_on_cpu import put_on_cpu

Weight = tuple[torch.Tensor, torch.Tensor, str]
NAMES = tuple(KINDS)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    put_on_cpu(monkeypatch)


def random_fields(kind: Kind, n: int, units: int) -> torch.Tensor:
    """Scales of a released weight's size: fields [n, units, S] int16."""
    halves = (torch.rand(n, units, kind.fields) * 2e-4 + 1e-5).half().view(torch.int16)
    fields = torch.randint(-(1 << 15), 1 << 15, (n, units, kind.fields)).to(torch.int16)
    if kind.name in ("Q8_0", "Q4_0"):
        return (torch.rand(n, units, kind.fields) * 0.02 + 1e-3).half().view(torch.int16)
    if kind.name == "NVFP4":
        return (torch.rand(n, units, 8) * 2).to(torch.float8_e4m3fn).view(torch.int16)
    if kind.name == "MXFP4":
        return torch.randint(115, 124, (n, units, 4)).to(torch.uint8).view(torch.int16)
    if kind.name == "IQ4_XS":
        fields &= 0xFFF
    halved = 2 if kind.name in ("Q4_K", "Q5_K") else 1
    fields[..., :halved] = halves[..., :halved]
    return fields


def scaled_codes(name: str, n: int, k: int) -> Weight:
    """A random weight, packed."""
    kind = KINDS[name]
    codes = torch.randint(0, 1 << kind.bits, (n, k), dtype=torch.uint8)
    factor = torch.rand(n) * 0.02 + 1e-3 if kind.has_factor else None
    return pack(codes, kind), pack_scales(random_fields(kind, n, k // UNIT), kind, factor), name


def rows_of(weight: Weight, own: slice) -> Weight:
    words, scales, name = weight
    return words[own].contiguous(), scales[:, own].contiguous(), name


@pytest.mark.parametrize("name", NAMES)
def test_packing_is_reversed(name: str) -> None:
    kind, n, k = KINDS[name], 48, 384
    codes = torch.randint(0, 1 << kind.bits, (n, k), dtype=torch.uint8)
    fields = torch.randint(-(1 << 15), 1 << 15, (n, k // UNIT, kind.fields)).to(torch.int16)
    factor = torch.randn(n) if kind.has_factor else None
    words, scales = pack(codes, kind), pack_scales(fields, kind, factor)
    assert words.shape == (n, k // UNIT * kind.words)
    assert scales.shape == (kind.units(k), n, kind.fields)
    assert torch.equal(unpack(words, kind), codes)
    found, found_factor = unpack_scales(scales, kind)
    assert torch.equal(found, fields)
    assert (found_factor is None) if factor is None else torch.equal(found_factor, factor)
    # 16 rows are a weight of their own.
    assert torch.equal(unpack(words[16:32], kind), codes[16:32])
    assert torch.equal(unpack_scales(scales[:, 16:32], kind)[0], fields[16:32])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("on_cpu")
def test_values_are_rounded_once_in_interpreter(name: str) -> None:
    weight = scaled_codes(name, 80, 256)
    words, scales, _ = weight
    exact = values_in_float32(words, scales, KINDS[name])
    assert torch.equal(values_of(*weight), exact.bfloat16())
    found, factor = products(words, scales, KINDS[name])
    if factor is not None:
        assert torch.equal(found.bfloat16().float(), found)
        assert torch.equal(found * factor[:, None], exact)
    x = torch.randn(70, 256).bfloat16()
    y = linear_blocks.launch(x, *weight, True, True)
    values = values_of(*weight).double()
    torch.testing.assert_close(y.double(), x.double() @ values.T, rtol=1e-4, atol=1e-4)
    sums = linear_blocks_partials.launch(x, *weight, 1, 0, True)
    assert torch.equal(sums[0], linear_blocks.launch(x, *weight, False, True))


@pytest.mark.parametrize("name", NAMES)
def test_some_rows_are_those_of_the_whole_in_interpreter(name: str) -> None:
    weight = scaled_codes(name, 80, 256)
    whole = values_of(*weight)
    for ids in ([3], [79, 0, 17, 17, 64]):
        rows = torch.tensor(ids)
        assert torch.equal(block_rows.launch(rows, *weight), whole[rows])
        assert torch.equal(block_rows(rows, *weight), whole[rows])
    assert block_rows.launch(rows[:0], *weight).shape == (0, 256)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rows", [1, 5, 33])
@pytest.mark.usefixtures("on_cpu")
def test_kernels_on_a_cpu(name: str, rows: int) -> None:
    weight = scaled_codes(name, 80, 256)
    x = torch.randn(rows, 256).bfloat16()
    check_launch(linear_blocks, (x, *weight, True), rtol=1e-4, atol=1e-4)
    check_launch(linear_blocks, (x, *weight), rtol=1e-2, atol=1e-3)
    check_launch(linear_blocks_partials, (x, *weight, 2), rtol=1e-4, atol=1e-4)
    check_launch(linear_blocks_partials, (x, *weight, 2, 0, False, True), rtol=1e-4, atol=1e-4)
    check_launch(linear_blocks_silu_mul, (x, *rows_of(weight, slice(0, 64))), rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("on_cpu")
def test_rows_do_not_depend_on_their_number_on_a_cpu(name: str) -> None:
    weight = scaled_codes(name, 32, 128)
    x = torch.randn(129, 128).bfloat16()
    sizes = (1, 16, 17, 64, 65)
    check_row_invariance(lambda rows: linear_blocks.launch(x[:rows], *weight, True), sizes, 129)
    gated = linear_blocks_silu_mul.launch
    check_row_invariance(lambda rows: gated(x[:rows], *weight), sizes, 129)


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "NVFP4"])
@pytest.mark.usefixtures("on_cpu")
def test_programs_and_shards_have_the_same_bits_on_a_cpu(name: str) -> None:
    n, k, kind = 64, 1024, KINDS[name]
    weight = scaled_codes(name, n, k)
    x = torch.randn(5, k).bfloat16()
    assert count_k_splits(k) == 8
    whole = linear_blocks_partials.launch(x, *weight, 1)[0]
    for count in (2, 4, 8):
        partials = linear_blocks_partials.launch(x, *weight, count)
        assert torch.equal(add_tree(partials).bfloat16(), whole)
    codes, (fields, factor) = unpack(weight[0], kind), unpack_scales(weight[1], kind)
    halves = [
        linear_blocks_partials.launch(
            x[:, own].contiguous(),
            pack(codes[:, own].contiguous(), kind),
            pack_scales(fields[:, units].contiguous(), kind, factor),
            name,
            1,
            k,
        )[0]
        for own, units in ((slice(0, 512), slice(0, 4)), (slice(512, 1024), slice(4, 8)))
    ]
    assert torch.equal((halves[0] + halves[1]).bfloat16(), whole)
    rows = linear_blocks.launch(x, *rows_of(weight, slice(0, 32)))
    assert torch.equal(rows, linear_blocks.launch(x, *weight)[:, :32])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("on_cpu")
def test_gate_and_up_are_those_of_two_launches_on_a_cpu(name: str) -> None:
    x = torch.randn(5, 256).bfloat16()
    for n in (32, 96):
        weight = scaled_codes(name, n, 256)
        y = linear_blocks_silu_mul.launch(x, *weight)
        assert torch.equal(y, silu_mul.launch(linear_blocks.launch(x, *weight)))


def test_registration() -> None:
    weight = scaled_codes("Q4_K", 32, 256)
    x = torch.randn(3, 256).bfloat16()
    registered = torch.ops.compiled_mtp
    check_registration(registered.linear_blocks.default, (x, *weight, False, False))
    check_registration(registered.linear_blocks_silu_mul.default, (x, *weight))
    check_registration(registered.linear_blocks_partials.default, (x, *weight, 1, 0, False, False))
    check_registration(registered.block_rows.default, (torch.tensor([1, 30]), *weight))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(32, 65, dtype=torch.int16)}, r"^weight must have 32 words per 128 of 256"),
        ({"weight_scale": torch.zeros(3, 32, 5, dtype=torch.int16)}, r"^weight_scale must have 2 units of 5"),
        ({"kind": "Q2_K"}, r"^kind must be one of Q4_K, .*got Q2_K"),
        ({"x": torch.zeros(3, 256)}, r"^x must be bfloat16|^x must have dtype"),
    ],
)
def test_errors_name_the_argument_that_does_not_fit(change: dict[str, object], message: str) -> None:
    weight, scale, kind = scaled_codes("Q4_K", 32, 256)
    given = {"x": torch.zeros(3, 256).bfloat16(), "weight": weight, "weight_scale": scale, "kind": kind}
    with pytest.raises(ValueError, match=message):
        linear_blocks(**{**given, **change})


def test_gate_and_up_need_whole_blocks_of_rows() -> None:
    x = torch.zeros(3, 256).bfloat16()
    with pytest.raises(ValueError, match=r"^weight must have 16 or a multiple of 16 rows for gate and up"):
        linear_blocks_silu_mul(x, *scaled_codes("Q4_K", 48, 256))
