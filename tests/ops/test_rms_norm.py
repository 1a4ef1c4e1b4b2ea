"""rms_norm, add_rms_norm and pair_norm."""

from __future__ import annotations

import pytest
import torch

from compiled_mtp.ops.quantize_rows import quantize_rows
from compiled_mtp.ops.rms_norm import add_rms_norm, add_rms_norm_quantized, pair_norm, rms_norm
from tests.ops.harness import (
    assert_same_bits,
    check_compiles,
    check_equal,
    check_launch,
    check_registration,
    check_row_invariance,
    poisoned_allocations,
)

EPS = 1e-6


def norm_float64(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x64 = x.double()
    return x64 * torch.rsqrt(x64.square().mean(-1, keepdim=True) + EPS) * (1 + weight.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 100, 1024])
def test_equals_float64(dtype: torch.dtype, width: int) -> None:
    x, residual = torch.randn(2, 7, width).to(dtype).unbind(0)
    weight = torch.randn(width).to(dtype)
    torch.testing.assert_close(rms_norm(x, weight, EPS), norm_float64(x, weight).to(dtype))
    y, new_residual = add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(new_residual, x + residual)
    # The norm reads the rounded residual, so that a later layer reads the same value.
    assert torch.equal(y, rms_norm(new_residual, weight, EPS))


def test_bad_arguments_raise() -> None:
    x, weight = torch.zeros(2, 8), torch.zeros(8)
    with pytest.raises(ValueError, match=r"weight must have shape \[8\], got \[6\]"):
        rms_norm(x, torch.zeros(6), EPS)
    with pytest.raises(ValueError, match=r"x must have shape \[M, H\], got \[8\]"):
        rms_norm(weight, weight, EPS)
    with pytest.raises(ValueError, match="x must have dtype"):
        rms_norm(x.half(), weight, EPS)
    with pytest.raises(ValueError, match="weight must have dtype"):
        rms_norm(x, weight.half(), EPS)
    with pytest.raises(ValueError, match="at most 32768 columns"):
        rms_norm(torch.zeros(1, 40000), torch.zeros(40000), EPS)
    with pytest.raises(ValueError, match="residual must have shape"):
        add_rms_norm(x, torch.zeros(3, 8), weight, EPS)
    with pytest.raises(ValueError, match="residual must have dtype"):
        add_rms_norm(x.bfloat16(), x, weight, EPS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_partials_are_added_as_a_tree_and_rounded_first(dtype: torch.dtype) -> None:
    parts, residual, weight = torch.randn(8, 4, 64), torch.randn(4, 64).to(dtype), torch.randn(64).to(dtype)
    pairs = [parts[i] + parts[i + 1] for i in (0, 2, 4, 6)]
    x = ((pairs[0] + pairs[1]) + (pairs[2] + pairs[3])).to(dtype)
    for got, wanted in zip(
        add_rms_norm(parts, residual, weight, EPS), add_rms_norm(x, residual, weight, EPS), strict=True
    ):
        assert torch.equal(got, wanted)
    one = add_rms_norm(x[None], residual, weight, EPS)
    assert torch.equal(one[0], add_rms_norm(x, residual, weight, EPS)[0])
    with pytest.raises(ValueError, match=r"x must have one of \(1, 2, 4, 8\) parts, got 3"):
        add_rms_norm(parts[:3], residual, weight, EPS)
    with pytest.raises(ValueError, match=r"x must have dtype torch\.float32"):
        add_rms_norm(parts.bfloat16(), residual.bfloat16(), weight.bfloat16(), EPS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kept_rows_are_those_of_all_rows(dtype: torch.dtype) -> None:
    parts, residual, weight = torch.randn(2, 7, 64), torch.randn(7, 64).to(dtype), torch.randn(64).to(dtype)
    kept = torch.tensor([6, 0, 3, 3])
    for x in (parts, parts[0].to(dtype)):
        everything = add_rms_norm(x, residual, weight, EPS)
        for got, wanted in zip(add_rms_norm(x, residual, weight, EPS, kept), everything, strict=True):
            assert torch.equal(got, wanted[kept])
    with pytest.raises(ValueError, match="kept_rows must have dtype"):
        add_rms_norm(parts, residual, weight, EPS, kept.int())


def make_pair(rows: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    table, hidden = torch.randn(50, width).to(dtype), torch.randn(rows, width).to(dtype)
    weights = torch.randn(2, width).to(dtype).unbind(0)
    return table, torch.randint(0, 50, (rows,)), hidden, *weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pair_is_two_norms_side_by_side(dtype: torch.dtype) -> None:
    table, ids, hidden, embedding_weight, hidden_weight = make_pair(5, 48, dtype)
    got = pair_norm(table, ids, hidden, embedding_weight, hidden_weight, EPS)
    assert torch.equal(got[:, :48], rms_norm(table[ids], embedding_weight, EPS))
    assert torch.equal(got[:, 48:], rms_norm(hidden, hidden_weight, EPS))


def test_a_pair_that_does_not_fit_raises() -> None:
    table, ids, hidden, *weights = make_pair(3, 8, torch.float32)
    with pytest.raises(ValueError, match="hidden must have shape"):
        pair_norm(torch.zeros(9, 6), ids, hidden, torch.zeros(6), weights[1], EPS)
    with pytest.raises(ValueError, match="table must have dtype"):
        pair_norm(table.bfloat16(), ids, hidden, *weights, EPS)
    with pytest.raises(ValueError, match="table must be contiguous"):
        pair_norm(torch.zeros(9, 16)[:, :8], ids, hidden, *weights, EPS)
    with pytest.raises(ValueError, match=r"hidden must have shape \[2, 8\], got \[3, 8\]"):
        pair_norm(table, ids[:2], hidden, *weights, EPS)
    with pytest.raises(ValueError, match="token_ids must have dtype"):
        pair_norm(table, ids.int(), hidden, *weights, EPS)


def test_registration_and_compile() -> None:
    norm_cases = [(torch.randn(m, 12), torch.randn(12), EPS) for m in (3, 5)]
    add_cases = [(torch.randn(m, 12), torch.randn(m, 12), torch.randn(12), EPS, None) for m in (3, 5)]
    kept_case = (*add_cases[0][:4], torch.tensor([2, 0]))
    check_registration(torch.ops.compiled_mtp.add_rms_norm.default, (*kept_case, False))
    check_compiles(add_rms_norm, [kept_case])
    check_registration(torch.ops.compiled_mtp.rms_norm.default, norm_cases[0])
    check_registration(torch.ops.compiled_mtp.add_rms_norm.default, (*add_cases[0], False))
    pair_cases = [(*make_pair(m, 12, torch.float32), EPS) for m in (3, 5)]
    check_registration(torch.ops.compiled_mtp.pair_norm.default, pair_cases[0])
    check_compiles(pair_norm, pair_cases)
    check_compiles(rms_norm, norm_cases)
    check_compiles(add_rms_norm, add_cases)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_do_not_depend_on_each_other(dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, 70, 101).to(dtype).unbind(0)
    weight = torch.randn(101)
    check_row_invariance(lambda m: add_rms_norm(x[:m], residual[:m], weight, EPS), range(1, 70), 70)
    table, ids, hidden, *weights = make_pair(70, 101, dtype)
    check_row_invariance(lambda m: pair_norm(table, ids[:m], hidden[:m], *weights, EPS), range(1, 70), 70)


@pytest.mark.parametrize("dtype, rtol", [(torch.float32, 2e-6), (torch.bfloat16, 8e-3)])
def test_the_cpu_computes_the_specification(dtype: torch.dtype, rtol: float) -> None:
    x, residual, weight = torch.randn(3, 256).to(dtype), torch.randn(3, 256).to(dtype), torch.randn(256)
    check_equal(rms_norm, rms_norm.reference, (x, weight, EPS), rtol=rtol, atol=1e-6)
    for parts in (x, x[None], torch.randn(4, 3, 256)):
        for kept in (None, torch.tensor([2, 0])):
            args = (parts, residual, weight, EPS, kept)
            check_equal(add_rms_norm, add_rms_norm.reference, args, rtol=rtol, atol=1e-6)
    args = (*make_pair(3, 256, dtype), EPS)
    check_equal(pair_norm, pair_norm.reference, args, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("dtype, rtol", [(torch.float32, 1e-5), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize("width", [100, 1024])
def test_kernels_in_interpreter(interpreter: None, dtype: torch.dtype, rtol: float, width: int) -> None:
    wide = torch.randn(3, width + 5).to(dtype)
    wide[:, width:] = float("nan")
    x, residual, weight = wide[:, :width], torch.randn(3, width).to(dtype), torch.randn(width).to(dtype)
    check_launch(rms_norm, (x, weight, EPS), rtol=rtol, atol=1e-6)
    check_launch(add_rms_norm, (x, residual, weight, EPS), rtol=rtol, atol=1e-6)
    for parts in (x[None].contiguous(), torch.randn(2, 3, width), torch.randn(8, 3, width)):
        args = (parts, residual, weight, EPS)
        check_launch(add_rms_norm, args, rtol=rtol, atol=1e-6)
        args = (*args, torch.tensor([2, 0]))
        check_launch(add_rms_norm, args, rtol=rtol, atol=1e-6)
    table, ids, _, *weights = make_pair(3, width, dtype)
    check_launch(pair_norm, (table, ids, x, *weights, EPS), rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 2, 8])
def test_stacked_partials_give_the_bits_of_separate_ones(
    interpreter: None, dtype: torch.dtype, count: int
) -> None:
    """With one partial, the stacked sum is still in float32 and must be rounded."""
    parts, residual, weight = torch.randn(count, 3, 256), torch.randn(3, 256).to(dtype), torch.randn(256)
    weight, stacked = weight.to(dtype), parts.flatten(0, 1)
    for kept in (None, torch.tensor([2, 0])):
        last = (residual, weight, EPS, kept)
        same = parts.to(dtype) if count == 1 else parts
        for norm in (add_rms_norm, add_rms_norm_quantized):
            assert_same_bits(norm(stacked, *last), norm(same, *last))
            assert_same_bits(norm.reference(stacked, *last), norm.reference(same, *last))
            with poisoned_allocations():
                assert_same_bits(norm.launch(stacked, *last), norm.launch(same, *last))
    with pytest.raises(ValueError, match=r"residual must have shape \[7, 256\], got \[3, 256\]; compare x"):
        add_rms_norm(torch.randn(7, 256), residual, weight, EPS)
    with pytest.raises(ValueError, match=r"x must have one of \(1, 2, 4, 8\) parts, got 3"):
        add_rms_norm(torch.randn(9, 256), residual, weight, EPS)


@pytest.mark.parametrize("width", [256, 384, 640])
def test_quantised_is_one_after_the_other(interpreter: None, width: int) -> None:
    """The operator and its kernel give the bits of the norm and then the quantisation; for a sum and for its
    partials."""
    for dtype, parts in ((torch.bfloat16, None), (torch.float32, None), (torch.bfloat16, 4)):
        x = torch.randn(3, width, dtype=dtype) if parts is None else torch.randn(parts, 3, width)
        args = (x, torch.randn(3, width, dtype=dtype), torch.randn(width, dtype=dtype), EPS)
        norm = add_rms_norm(*args)
        assert_same_bits(add_rms_norm_quantized(*args), (*norm, *quantize_rows(norm[0])))
        with poisoned_allocations():
            got, norm = add_rms_norm_quantized.launch(*args), add_rms_norm.launch(*args)
        assert_same_bits(got, (*norm, *quantize_rows.launch(norm[0])))
    kept = torch.tensor([2, 0])
    got = add_rms_norm_quantized(*args, kept)
    assert_same_bits(got, tuple(whole[kept] for whole in add_rms_norm_quantized(*args)))
    with poisoned_allocations():
        assert_same_bits(
            add_rms_norm_quantized.launch(*args, kept),
            tuple(whole[kept] for whole in add_rms_norm_quantized.launch(*args)),
        )
    torch.library.opcheck(add_rms_norm_quantized.overload, (*args, kept))
    with pytest.raises(ValueError, match="x must have a multiple of 128 columns, two at least, got 128; use"):
        add_rms_norm_quantized(x[..., :128], args[1][:, :128], args[2][:128], EPS)
