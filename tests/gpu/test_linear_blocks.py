"""Weights of scaled codes on a GPU: rows have the same bits in every tile, and the values of float64."""

from __future__ import annotations

import pytest
import torch

from compiled_mtp.ops.blocks import KINDS, values
from compiled_mtp.ops.k_splits import add_tree
from compiled_mtp.ops.linear_blocks import (
    block_rows,
    linear_blocks,
    linear_blocks_partials,
    linear_blocks_silu_mul,
)
from compiled_mtp.ops.linear_blocks.kernel import values_of
from compiled_mtp.ops.silu_mul import silu_mul
from tests.ops.test_linear_blocks import scaled_codes

pytestmark = pytest.mark.gpu

ROWS = (1, 4, 16, 17, 32, 33, 64, 65, 128)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("n", "k"), [(34816, 5120), (5120, 17408), (1024, 3584), (48, 256)])
def test_rows_have_the_same_bits_and_the_values_of_float64(n: int, k: int, name: str) -> None:
    torch.manual_seed(n + k)
    words, scales, _ = scaled_codes(name, n, k)
    weight = (words.cuda(), scales.cuda(), name)
    x = torch.randn(129, k, device="cuda").bfloat16()
    exact = values(words.cuda(), scales.cuda(), KINDS[name])
    assert torch.equal(values_of(*weight), exact.bfloat16())
    ids = torch.randint(0, n, (37,), device="cuda")
    assert torch.equal(block_rows(ids, *weight), exact[ids].bfloat16())
    rounded = exact if KINDS[name].has_factor else exact.bfloat16()
    multiplied = exact if KINDS[name].scales_sums else rounded
    whole = linear_blocks(x, *weight, True)
    wanted = x.double() @ multiplied.double().T
    # One chain of K, which tensor cores truncate every 16 columns (docs/numerics.md).
    assert (whole - wanted).norm() / wanted.norm() < max(1e-5, k / 16 * 2**-25)
    if n % 32 == 0:
        gated = linear_blocks_silu_mul(x, *weight)
        assert torch.equal(gated, silu_mul(linear_blocks(x, *weight)))
    sums = linear_blocks_partials(x, *weight, 1)[0]
    for rows in ROWS:
        assert torch.equal(linear_blocks(x[:rows], *weight, True), whole[:rows]), rows
        if n % 32 == 0:
            assert torch.equal(linear_blocks_silu_mul(x[:rows], *weight), gated[:rows]), rows
        for count in (1, 2, 4, 8) if k % 1024 == 0 else (1,):
            partials = linear_blocks_partials(x[:rows], *weight, count)
            assert torch.equal(add_tree(partials).bfloat16(), sums[:rows]), (rows, count)
    prompt = linear_blocks(x, *weight, True, True)
    wanted = x.double() @ rounded.double().T
    assert (prompt - wanted).norm() / wanted.norm() < 4e-3
