"""linear: row-invariant products with bf16, float32 and FP8 block-128 weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compiled_mtp.models.row_unit import cancelling
from compiled_mtp.ops.k_splits import add_tree, count_k_splits
from compiled_mtp.ops.linear import linear, linear_partials, linear_side, linear_silu_mul
from compiled_mtp.ops.linear.config import (
    LinearConfig,
    choose,
    linear_config,
)
from compiled_mtp.ops.linear_w8a8 import linear_w8a8_partials
from compiled_mtp.ops.silu_mul import silu_mul
from tests.ops.harness import (
    check_compiles,
    check_equal,
    check_launch,
    check_registration,
    check_row_invariance,
)


def block_fp8(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """An FP8 weight, its scales and its exact float64 values."""
    weight = (torch.randn(n, k) * 40).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-n // 128), -(-k // 128)) * 0.01 + 0.001
    rows, columns = torch.arange(n) // 128, torch.arange(k) // 128
    return weight, scale, weight.double() * scale.double()[rows][:, columns]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("out_float32", [False, True])
def test_equals_float64(dtype: torch.dtype, out_float32: bool) -> None:
    x, weight = torch.randn(5, 96, dtype=dtype), torch.randn(130, 96, dtype=dtype)
    y = linear(x, weight, None, out_float32)
    assert y.dtype == (torch.float32 if out_float32 else dtype)
    assert y.is_contiguous()
    torch.testing.assert_close(y, (x.double() @ weight.double().T).to(y.dtype), rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("n, k", [(130, 96), (128, 300), (8300, 16)])
def test_fp8_equals_float64(n: int, k: int) -> None:
    weight, scale, exact = block_fp8(n, k)
    x = torch.randn(3, k)
    torch.testing.assert_close(linear(x, weight, scale), (x.double() @ exact.T).float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 4, 5])
@pytest.mark.parametrize("has_scale", [False, True])
def test_the_cpu_computes_the_specification(rows: int, has_scale: bool) -> None:
    weight, scale = (torch.randn(8200, 96) * 0.3).bfloat16(), None
    if has_scale:
        weight, scale, _ = block_fp8(8200, 96)
    x = torch.randn(rows, 96).bfloat16()
    for args in ((x, weight, scale, False, False), (x, weight, scale, True, True)):
        check_equal(linear, linear.reference, args, rtol=8e-3, atol=1e-3)
    check_equal(linear_silu_mul, linear_silu_mul.reference, (x, weight, scale), rtol=1.6e-2, atol=1e-3)
    check_equal(linear_partials, linear_partials.reference, (x, weight, scale, 1), rtol=8e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 16, 128), (4, 40, 320), (37, 24, 100), (3, 24, 768)])
def test_a_side_product_in_interpreter(
    interpreter: None, dtype: torch.dtype, rows: int, n: int, k: int
) -> None:
    wide = torch.full((rows, k + 8), float("nan"), dtype=dtype)
    wide[:, :k] = torch.randn(rows, k)
    x, weight = wide[:, :k], torch.randn(n, k, dtype=dtype)
    atol = 1e-4 if dtype == torch.float32 else 1e-3
    check_launch(linear_side, (x, weight), rtol=8e-3 if dtype == torch.bfloat16 else 1e-5, atol=atol)
    y = linear_side.launch(x, weight)
    alone = [linear_side.launch(x[row : row + 1], weight) for row in range(rows)]
    assert torch.equal(torch.cat(alone), y)
    # A rank has some of the weight's rows.
    assert torch.equal(linear_side.launch(x, weight[8:]), y[:, 8:])


def test_a_side_product_is_a_product_on_a_cpu() -> None:
    x, weight = torch.randn(3, 96), torch.randn(24, 96)
    check_registration(torch.ops.compiled_mtp.linear_side.default, (x, weight))
    check_equal(linear_side, linear_side.reference, (x, weight), rtol=1e-5, atol=1e-5)
    assert torch.equal(linear_side(x, weight), linear(x, weight))
    with pytest.raises(ValueError, match="weight"):
        linear_side(x, weight.bfloat16())


def test_registration_and_compile() -> None:
    weight = torch.randn(24, 16)
    cases = [(torch.randn(m, 16), weight, None, False, False) for m in (3, 5)]
    check_registration(torch.ops.compiled_mtp.linear.default, (*cases[0], 0, 0, False))
    check_compiles(linear, cases)
    fp8, scale, _ = block_fp8(24, 16)
    check_compiles(linear, [(torch.randn(m, 16).bfloat16(), fp8, scale, True, True) for m in (3, 5)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_silu_mul_is_one_after_the_other(dtype: torch.dtype) -> None:
    weight = (torch.randn(48, 16) * 0.3).to(dtype)
    cases = [(torch.randn(m, 16).to(dtype), weight, None) for m in (3, 5)]
    check_registration(torch.ops.compiled_mtp.linear_silu_mul.default, (*cases[0], 0, 0, False))
    check_compiles(linear_silu_mul, cases)
    for x, _, _ in cases:
        assert torch.equal(linear_silu_mul(x, weight), silu_mul(linear(x, weight)))
    with pytest.raises(ValueError, match="weight must have an even number of rows"):
        linear_silu_mul(cases[0][0], weight[:47])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_partials_add_up_to_linear(dtype: torch.dtype) -> None:
    weight = (torch.randn(48, 16) * 0.3).to(dtype)
    cases = [(torch.randn(m, 16).to(dtype), weight, None, 1) for m in (3, 5)]
    check_registration(torch.ops.compiled_mtp.linear_partials.default, (*cases[0], 0, 0, False, False, False))
    check_compiles(linear_partials, cases)
    for x, *_ in cases:
        parts = linear_partials(x, weight, None, 1)
        assert torch.equal(parts, linear_partials(x, weight, None, 1, prefill=True))
        torch.testing.assert_close(parts[0], linear(x, weight))
    with pytest.raises(ValueError, match=r"count must be one of \(1,\) for this weight and device, got 2"):
        linear_partials(cases[0][0], weight, None, 2)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "fp8"])
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_shards_of_a_weight_have_the_bits_of_the_whole_on_a_cpu(kind: str, rows: int) -> None:
    """Four K splits with every number of shards, each shard a matrix of its own, as on a rank."""
    k = 512
    weight, scale, _ = block_fp8(200, k)
    x = torch.randn(rows, k).bfloat16()
    if kind != "fp8":
        weight, scale, x = torch.randn(200, k).to(getattr(torch, kind)), None, x.to(getattr(torch, kind))
    whole = linear_partials(x, weight, scale, 1)
    assert whole.dtype == x.dtype
    for shards in (2, 4):
        parts = []
        for x_shard, shard, first in zip(x.chunk(shards, 1), weight.chunk(shards, 1), range(4), strict=False):
            blocks = None if scale is None else scale.chunk(shards, 1)[first]
            part = linear_partials(x_shard.contiguous(), shard.contiguous(), blocks, 1, 0, k)
            assert part.dtype == torch.float32
            parts.append(part[0])
        assert torch.equal(add_tree(parts).to(x.dtype), whole[0]), shards


@pytest.mark.parametrize(("n", "k"), [(1, 8), (5, 20), (7, 64)])
def test_small_k_splits_are_row_invariant(n: int, k: int) -> None:
    x, weight = torch.randn(70, k), torch.randn(n, k)
    check_row_invariance(lambda m: linear_partials(x[:m], weight, None, 1)[0], range(1, 70), 70)


@pytest.mark.parametrize("count", [2, 4, 8])
def test_the_reference_of_partials_is_their_tree(count: int) -> None:
    """As on a GPU whose operators use their reference: P is the kernel's."""
    x = torch.randn(5, 1024)
    weight, scale, exact = block_fp8(200, 1024)
    parts = linear_partials.reference(x, weight, scale, count)
    assert parts.shape == (count, 5, 200)
    torch.testing.assert_close(parts.sum(0), (x.double() @ exact.T).float(), rtol=1e-4, atol=1e-4)
    eight = linear_partials.reference(x, weight, scale, 8)
    assert torch.equal(add_tree(parts), add_tree(eight))
    if count == 4:
        half = [
            linear_partials.reference(x[:, c], weight[:, c], scale[:, b], count // 2, 200, 1024)
            for c, b in ((slice(0, 512), slice(0, 4)), (slice(512, 1024), slice(4, 8)))
        ]
        assert torch.equal(torch.cat(half), parts)


def test_k_splits_are_equal_and_whole_blocks() -> None:
    """K of all released shapes: 0.8B, 4B, 9B, 27B, 35B-A3B and an expert."""
    for k in (2048, 4096, 5120, 6144, 8192, 9216, 12288, 17408):
        assert count_k_splits(k) == 8
    assert [count_k_splits(k) for k in (3584, 512, 256, 128, 1001)] == [4, 4, 2, 1, 1]


@pytest.mark.parametrize(
    "dtype, out_float32", [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]
)
@pytest.mark.parametrize("n, k", [(96, 64), (333, 1000), (17, 5120)])
def test_rows_do_not_depend_on_each_other(dtype: torch.dtype, out_float32: bool, n: int, k: int) -> None:
    x, weight = torch.randn(257, k).to(dtype), torch.randn(n, k).to(dtype)
    sizes = [*range(1, 34), 63, 64, 65, 127, 128, 200]
    check_row_invariance(lambda m: linear(x[:m], weight, None, out_float32), sizes, 257)


@pytest.mark.parametrize(
    "n, k", [(1, 80), (6, 16), (17, 5120), (96, 64), (333, 1000), (768, 48), (1024, 2048)]
)
def test_bfloat16_sums_have_one_order(n: int, k: int) -> None:
    """On numbers whose sums consist of rounding errors, which rounding to bfloat16 does not hide."""
    x, weight = cancelling(257, n, k, torch.Generator().manual_seed(n))
    assert (linear(x, weight) != 0).float().mean() > 0.1
    check_row_invariance(lambda m: linear(x[:m], weight), [*range(1, 41), 63, 64, 65, 128, 200], 257)
    for m in (1, 2, 5, 64):
        whole = linear(x[:m], weight)
        for first, end in ((0, -(-n // 2)), (n // 3, n)):
            assert torch.equal(linear(x[:m], weight[first:end]), whole[:, first:end])


def test_rows_do_not_depend_on_each_other_fp8() -> None:
    x = torch.randn(65, 300).bfloat16()
    weight, scale, _ = block_fp8(200, 300)
    check_row_invariance(lambda m: linear(x[:m], weight, scale), range(1, 65), 65)


# (rows, N, K, FP8): two row tiles and a partial one, N and K that no tile divides, K in one and two splits.
@pytest.mark.parametrize(
    "rows, n, k, fp8",
    [
        (3, 40, 600, False),
        (3, 40, 1100, False),
        (37, 70, 256, False),
        (3, 200, 300, True),
        (20, 40, 1100, True),
    ],
)
@pytest.mark.parametrize("out_float32", [False, True])
def test_kernel_in_interpreter(
    interpreter: None, rows: int, n: int, k: int, fp8: bool, out_float32: bool
) -> None:
    wide = torch.randn(rows, k + 8).bfloat16()
    wide[:, k:] = float("nan")
    weight, scale = (torch.randn(n, k) * k**-0.5).bfloat16(), None
    if fp8:
        weight, scale, _ = block_fp8(n, k)
        scale = scale * k**-0.5
    args = (wide[:, :k], weight, scale, out_float32, False)
    rtol = 1e-5 if out_float32 else 8e-3
    # Twice: the first launch must leave the arrival counters ready for the second.
    for _ in range(2):
        check_launch(linear, args, rtol=rtol, atol=1e-5)


@pytest.mark.parametrize("split, chains, block_k", [(1, 4, 256), (4, 8, 128)])
@pytest.mark.parametrize("fp8", [False, True])
def test_one_step_in_interpreter(interpreter: None, split: int, chains: int, block_k: int, fp8: bool) -> None:
    from compiled_mtp.ops.linear.kernel import launch_config

    block_k = 128 if fp8 else block_k
    k = split * chains * block_k
    x = torch.randn(5, k).bfloat16()
    weight, scale = (torch.randn(40, k) * k**-0.5).bfloat16(), None
    if fp8:
        weight, scale, _ = block_fp8(40, k)
        scale = scale * k**-0.5
    config = LinearConfig(16, 16, block_k, 4, 2, split, chains, 256)
    assert config.is_one_step(k)

    def launch(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, *_: bool) -> torch.Tensor:
        return launch_config(config, x, weight, scale, True)

    check_launch(linear, (x, weight, scale, True, False), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("gated", [False, True])
def test_scales_beyond_k_are_not_read(interpreter: None, gated: bool) -> None:
    """Three blocks of K in two chains: the second chain has a step without columns and without a scale."""
    from compiled_mtp.ops.linear.kernel import launch_config

    weight, scale, exact = block_fp8(256, 384)
    guarded = torch.full((scale.numel() + 4,), float("nan"))
    guarded[: scale.numel()] = scale.flatten()
    x = torch.randn(3, 384).bfloat16()
    config = LinearConfig(16, 16, 128, 4, 2, 1, 2, 0)
    assert not config.is_even(384)
    y = launch_config(config, x, weight, guarded[: scale.numel()].view(2, 3), True, gated)
    assert y.isfinite().all()
    if not gated:
        torch.testing.assert_close(y, (x.double() @ exact.T).float(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "rows, n, k, fp8",
    [
        (3, 40, 1024, False),
        (20, 40, 1024, True),
        (20, 40, 1024, False),
        (70, 40, 512, False),
        (3, 40, 130, False),
    ],
)
def test_programs_and_shards_have_the_same_bits(
    interpreter: None, rows: int, n: int, k: int, fp8: bool
) -> None:
    """1, 2, 4 or 8 programs add the K splits, of one weight or of two halves of its columns."""
    weight, scale = (torch.randn(n, k) * k**-0.5).bfloat16(), None
    if fp8:
        weight, scale, _ = block_fp8(n, k)
    x = torch.randn(rows, k).bfloat16()
    k_splits = count_k_splits(k)
    whole = linear_partials.launch(x, weight, scale, k_splits)
    wanted = add_tree(whole).bfloat16()
    torch.testing.assert_close(wanted, linear.reference(x, weight, scale), rtol=2e-2, atol=1e-2)
    for count in (c for c in (1, 2, 4, 8) if c <= k_splits):
        parts = linear_partials.launch(x, weight, scale, count)
        assert parts.shape == (count, rows, n)
        assert parts.dtype == (torch.bfloat16 if count == 1 else torch.float32)
        assert torch.equal(add_tree(parts).bfloat16(), wanted), f"{count} programs"
        stacked = linear_partials.launch(x, weight, scale, count, stacked=True)
        assert (stacked.dtype, stacked.shape) == (torch.float32, (count * rows, n))
        assert torch.equal(stacked.unflatten(0, (count, rows)).to(parts.dtype), parts)
    if k_splits == 8:
        for first in (0, k // 2):
            columns, blocks = slice(first, first + k // 2), slice(first // 128, (first + k // 2) // 128)
            shard_scale = None if scale is None else scale[:, blocks]
            parts = linear_partials.launch(x[:, columns], weight[:, columns], shard_scale, 2, n, k)
            half = whole[:4] if first == 0 else whole[4:]
            assert torch.equal(add_tree(parts), add_tree(half))


def test_a_shard_has_the_configuration_of_the_whole(interpreter: None) -> None:
    """A shard of half the weight's rows gives the bits of the whole weight's product."""
    x, weight = torch.randn(3, 512).bfloat16(), torch.randn(128, 512).bfloat16()
    whole = linear.launch(x, weight, None, False, False, 16384)
    shard = linear.launch(x, weight[:64], None, False, False, 16384)
    assert torch.equal(shard, whole[:, :64])
    config = linear_config("sm_90", 227 * 1024, 34816, 5120, torch.bfloat16, torch.bfloat16, 16, False)
    device = torch.zeros(1, 5120, dtype=torch.bfloat16)
    assert choose(device, torch.empty(17408, 5120, dtype=torch.bfloat16), (34816, 5120), False) == config
    assert linear_silu_mul.launch(x, weight[:64], None, 16384).shape == (3, 32)


# One tile and several, one and several K splits, a width that no tile divides.
@pytest.mark.parametrize(
    "rows, width, k, fp8",
    [
        (3, 40, 256, False),
        (20, 40, 1100, False),
        (5, 20, 2100, False),
        (3, 128, 300, True),
        (17, 128, 600, True),
    ],
)
def test_gated_kernel_in_interpreter(interpreter: None, rows: int, width: int, k: int, fp8: bool) -> None:
    x = torch.randn(rows, k).bfloat16()
    weight, scale = (torch.randn(2 * width, k) * k**-0.5).bfloat16(), None
    if fp8:
        weight, scale, _ = block_fp8(2 * width, k)
        scale = scale * k**-0.5
    check_launch(linear_silu_mul, (x, weight, scale), rtol=1.6e-2, atol=1e-3)
    # The fused product gives the exact bits of the two launches.
    apart = silu_mul.launch(linear.launch(x, weight, scale))
    assert torch.equal(linear_silu_mul.launch(x, weight, scale), apart)


@pytest.mark.parametrize("rows, n, k", [(3, 40, 600), (70, 300, 130), (130, 257, 64)])
@pytest.mark.parametrize("out_float32", [False, True])
def test_prefill_kernel_in_interpreter(
    interpreter: None, rows: int, n: int, k: int, out_float32: bool
) -> None:
    wide = torch.randn(rows, k + 8).bfloat16()
    wide[:, k:] = float("nan")
    args = (wide[:, :k], (torch.randn(n, k) * k**-0.5).bfloat16(), None, out_float32, True)
    check_launch(linear, args, rtol=1e-5 if out_float32 else 8e-3, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_scale", [False, True])
def test_rows_of_a_prompt_do_not_depend_on_each_other(dtype: torch.dtype, has_scale: bool) -> None:
    x, weight, scale = torch.randn(512, 300).to(dtype), torch.randn(96, 300).to(dtype), None
    if has_scale:
        weight, scale, _ = block_fp8(96, 300)
    sizes = [1, 3, 64, 65, 127, 128, 200, 256, 511]
    check_row_invariance(lambda m: linear(x[:m], weight, scale, False, True), sizes, 512)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "fp8"])
def test_one_partial_of_a_prompt_is_its_product_in_interpreter(interpreter: None, kind: str) -> None:
    """Both calls make the same launch: without ranks, a prompt has the same bits and speed either way."""
    weight, scale, _ = block_fp8(40, 256)
    x = torch.randn(7, 256).bfloat16()
    if kind != "fp8":
        weight, scale, x = torch.randn(40, 256).to(getattr(torch, kind)), None, x.to(getattr(torch, kind))
    part = linear_partials.launch(x, weight, scale, 1, 0, 0, True)
    assert part.dtype == x.dtype
    assert torch.equal(part[0], linear.launch(x, weight, scale, False, True))


def test_kernel_float32_in_interpreter(interpreter: None) -> None:
    x, weight = torch.randn(18, 70), torch.randn(40, 70)
    check_launch(linear, (x, weight, None, False, False), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("quantised", [False, True])
def test_a_program_of_several_sizes_has_no_branch_on_the_count(quantised: bool) -> None:
    """The number of stacked partials is an expression of the rows, of which a compiled program has many."""
    weight = torch.zeros(8, 1024).to(torch.float8_e4m3fn if quantised else torch.bfloat16)
    scales, x_scale = torch.ones(1, 8), torch.ones(64, 8)

    def partials(x: torch.Tensor) -> torch.Tensor:
        count = 1 + 3 * min(1, (x.shape[0] - 1) // 16)
        if quantised:
            rows = x_scale[: x.shape[0]]
            return linear_w8a8_partials(x, rows, weight, scales, count, stacked=True)
        return linear_partials(x, weight, None, count, stacked=True)

    traced = []

    def stop(graph: Any, inputs: Any) -> Any:
        traced.append(graph)
        return lambda *args: (torch.empty(0),)

    torch._dynamo.reset()
    x = torch.zeros(32, 1024).to(weight.dtype)
    torch._dynamo.mark_dynamic(x, 0, min=4, max=64)
    torch.compile(partials, fullgraph=True, backend=stop)(x)
    assert len(traced) == 1


def test_bad_arguments_raise() -> None:
    x, weight = torch.zeros(2, 8), torch.zeros(4, 8)
    with pytest.raises(ValueError, match="x must have columns"):
        linear(torch.zeros(2, 0), torch.zeros(4, 0))
    with pytest.raises(ValueError, match="weight must have shape"):
        linear(x, torch.zeros(4, 9))
    with pytest.raises(ValueError, match="x must have dtype"):
        linear(x.half(), weight.half())
    with pytest.raises(ValueError, match="weight must have dtype"):
        linear(x, weight.bfloat16())
    with pytest.raises(ValueError, match="stride 1"):
        linear(x, torch.zeros(8, 4).t())
    for whole_n, whole_k in ((4, 12), (6, 8), (4, 64)):
        with pytest.raises(ValueError, match="whole_n and whole_k must be multiples of the weight's"):
            linear(x, weight, None, False, False, whole_n, whole_k)
    fp8 = weight.to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="weight_scale must be given"):
        linear(x, fp8)
    with pytest.raises(ValueError, match="weight_scale must have shape"):
        linear(x, fp8, torch.ones(2, 1))
    with pytest.raises(ValueError, match="weight_scale must have dtype"):
        linear(x, fp8, torch.ones(1, 1).bfloat16())
    with pytest.raises(ValueError, match="weight_scale must be None"):
        linear(x, weight, torch.ones(1, 1))
