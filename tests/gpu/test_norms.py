"""rms_norm, add_rms_norm, pair_norm and silu_mul on the device."""

from __future__ import annotations

import pytest
import torch

from compiled_mtp.ops.rms_norm import add_rms_norm, pair_norm, rms_norm
from compiled_mtp.ops.silu_mul import silu_mul
from tests.ops.harness import check_launch, check_row_invariance, rel_l2

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
EPS = 1e-6
WIDTHS = [1024, 2048, 2560, 4096, 5120, 100, 8192]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", WIDTHS)
def test_norms(width: int, dtype: torch.dtype) -> None:
    wide = torch.full((2, 5, width + 16), float("nan"), device="cuda", dtype=dtype)
    wide[:, :, :width] = torch.randn(2, 5, width, device="cuda") * 3
    x, residual = wide[:, :, :width].unbind(0)
    weight = torch.randn(width, device="cuda").to(dtype)
    # Half a unit in the last place of bfloat16, and one more if the two sums differ in their last bit.
    rtol = 7.9e-3 if dtype == torch.bfloat16 else 2e-6
    check_launch(rms_norm, (x, weight, EPS), rtol=rtol, atol=1e-6)
    check_launch(add_rms_norm, (x, residual, weight, EPS), rtol=rtol, atol=1e-6)
    exact = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + EPS) * (1 + weight.double())
    floor = rel_l2(exact.to(dtype), exact) if dtype == torch.bfloat16 else 1e-7
    assert rel_l2(rms_norm(x, weight, EPS), exact) < 2 * floor


@pytest.mark.parametrize("width", WIDTHS)
def test_norm_rows_do_not_depend_on_each_other(width: int) -> None:
    x, residual = torch.randn(2, 256, width, device="cuda").bfloat16().unbind(0)
    weight = torch.randn(width, device="cuda").bfloat16()
    check_row_invariance(lambda m: rms_norm(x[:m], weight, EPS), range(1, 257), 256)
    check_row_invariance(lambda m: add_rms_norm(x[:m], residual[:m], weight, EPS), range(1, 257), 256)
    kept, everything = torch.arange(3, 256, 4, device="cuda"), add_rms_norm(x, residual, weight, EPS)
    for got, wanted in zip(add_rms_norm(x, residual, weight, EPS, kept), everything, strict=True):
        assert torch.equal(got, wanted[kept])
    # A single row may have any stride; it must not select another kernel.
    row = torch.empty_strided((1, width), (1, 1), device="cuda", dtype=torch.bfloat16).copy_(x[:1])
    assert torch.equal(rms_norm(row, weight, EPS), rms_norm(x, weight, EPS)[:1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", WIDTHS)
def test_a_pair_is_two_norms_to_the_bit(width: int, dtype: torch.dtype) -> None:
    """For every number of rows, hidden rows of any stride, an embedding of more than 2^31 elements."""
    vocab = (2**31 // width + 1000) if width == 8192 and dtype == torch.bfloat16 else 1000
    table = torch.zeros(vocab, width, device="cuda", dtype=dtype)
    table[-1000:] = torch.randn(1000, width, device="cuda")
    ids = torch.randint(vocab - 1000, vocab, (256,), device="cuda")
    wide = torch.full((256, width + 16), float("nan"), device="cuda", dtype=dtype)
    wide[:, :width] = torch.randn(256, width, device="cuda")
    hidden = wide[:, :width]
    weights = torch.randn(2, width, device="cuda").to(dtype).unbind(0)
    apart = (rms_norm(table[ids], weights[0], EPS), rms_norm(hidden, weights[1], EPS))
    assert torch.equal(pair_norm(table, ids, hidden, *weights, EPS), torch.cat(apart, dim=1))
    check_row_invariance(lambda m: pair_norm(table, ids[:m], hidden[:m], *weights, EPS), range(1, 257), 256)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [3584, 9216, 17408, 37])
def test_silu_mul(width: int, dtype: torch.dtype) -> None:
    wide = torch.full((256, 2 * width + 16), float("nan"), device="cuda", dtype=dtype)
    wide[:, : 2 * width] = torch.randn(256, 2 * width, device="cuda") * 4
    gate_up = wide[:, : 2 * width]
    rtol = 7.9e-3 if dtype == torch.bfloat16 else 2e-6
    check_launch(silu_mul, (gate_up,), rtol=rtol, atol=1e-6)
    check_row_invariance(lambda m: silu_mul(gate_up[:m]), range(1, 256, 5), 256)
    gate, up = gate_up.double().chunk(2, -1)
    exact = gate * torch.sigmoid(gate) * up
    floor = rel_l2(exact.to(dtype), exact) if dtype == torch.bfloat16 else 1e-7
    assert rel_l2(silu_mul(gate_up), exact) < 2 * floor
