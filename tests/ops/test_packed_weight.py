"""Copies of weights in half precision: made only if exact, and row-invariant."""

from __future__ import annotations

import pytest
import torch

from compiled_mtp.ops import packed_weight
from compiled_mtp.ops.k_splits import add_tree
from compiled_mtp.ops.linear import linear, linear_partials
from compiled_mtp.ops.packed_weight import (
    PackedWeight,
    find_packed,
    largest_exponent,
    may_pack,
    pack,
    unpack,
)
from tests.ops.gdn_cases import torch_threads
from tests.ops.harness import check_row_invariance

has_library = pytest.mark.skipif(
    "fbgemm" not in torch.backends.quantized.supported_engines, reason="this torch has no fbgemm"
)


def stored_weight(rows: int = 1400, columns: int = 96) -> torch.Tensor:
    """Return a weight in float32 whose values are exact in bfloat16, as from a bfloat16 checkpoint."""
    return (torch.randn(rows, columns) * 0.02).bfloat16().float()


@has_library
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_packed_weight_multiplies_like_the_weight_and_is_row_invariant(threads: int) -> None:
    x, weight = torch.randn(70, 96), stored_weight()
    assert pack(weight)
    with torch_threads(threads):
        torch.testing.assert_close(
            linear(x, weight).double(), x.double() @ weight.double().T, rtol=0, atol=1e-6
        )
        check_row_invariance(lambda m: linear(x[:m], weight), range(1, 70), 70)


@has_library
def test_compiled_code_finds_the_packed_weight() -> None:
    x, weight = torch.randn(4, 96), torch.nn.Parameter(stored_weight(), requires_grad=False)
    assert pack(weight)
    plain, packed = linear(x, weight), find_packed(weight)
    assert packed is not None
    weight.packed = packed._replace(factor=2.0 * packed.factor)  # type: ignore[attr-defined]
    assert torch.equal(linear(x, weight), 2.0 * plain)
    assert torch.equal(linear.overload(x, weight, None, False, False, 0, 0, False), 2.0 * plain)


def test_an_inexact_weight_is_not_packed() -> None:
    wide = stored_weight()
    wide[0, 0], wide[0, 1] = 1e-9, 1e9
    infinite = stored_weight()
    infinite[3, 5] = -torch.inf
    for weight in (torch.randn(700, 96), wide, infinite, stored_weight() * torch.nan):
        assert not pack(weight)
        assert find_packed(weight) is None
    weight = stored_weight()
    least, most = packed_weight.LEAST_ELEMENTS, packed_weight.MOST_ELEMENTS
    has_library = "fbgemm" in torch.backends.quantized.supported_engines
    assert [may_pack(weight, size) for size in (least, most)] == [has_library] * 2
    assert not any(may_pack(weight, size) for size in (least - 1, most + 1))
    assert not may_pack(weight.bfloat16(), least)


@has_library
@pytest.mark.parametrize("ranks", [2, 4])
def test_weight_shards_have_the_bits_of_the_whole(ranks: int) -> None:
    """Shards of rows are concatenated; shards of columns give each rank's K splits, which are added as a
    tree."""
    weight = stored_weight(1032, 512)
    rows, sums = torch.randn(37, 512), weight.clone()
    assert pack(weight)
    assert pack(sums, k_splits=4)
    exponent = largest_exponent(weight)
    shards = [shard.contiguous() for shard in weight.chunk(ranks)]
    assert all(pack(shard, exponent=exponent) for shard in shards)
    assert torch.equal(torch.cat([linear(rows, shard) for shard in shards], dim=1), linear(rows, weight))

    shards = [shard.contiguous() for shard in sums.chunk(ranks, dim=1)]
    assert all(pack(shard, k_splits=4 // ranks, exponent=exponent) for shard in shards)
    pairs = zip(rows.chunk(ranks, dim=1), shards, strict=True)
    parts = [linear_partials(x, shard, None, 1, 0, 512)[0] for x, shard in pairs]
    whole = linear_partials(rows, sums, None, 1)[0]
    assert torch.equal(add_tree(parts), whole)
    torch.testing.assert_close(whole.double(), rows.double() @ weight.double().T, rtol=0, atol=1e-5)
    assert not torch.equal(whole, linear(rows, weight))
    check_row_invariance(lambda m: linear_partials(rows[:m], sums, None, 1)[0], range(1, 37), 37)
    unpack(sums)
    assert find_packed(sums) is None


@has_library
@pytest.mark.parametrize(
    ("mixed", "least"), [((), 1), ((1, 2), 3), ((1, 2, 3), 4), ((4,), None), ((12,), None)]
)
def test_a_call_has_as_few_rows_as_keep_their_bits(
    monkeypatch: pytest.MonkeyPatch, mixed: tuple[int, ...], least: int | None
) -> None:
    def multiply(x: torch.Tensor, matrix: torch.Tensor, bias: None) -> torch.Tensor:
        return torch.linalg.vecdot(x[:, None], matrix) + (len(x) in mixed)

    monkeypatch.setattr(torch, "fbgemm_pack_gemm_matrix_fp16", lambda weight: weight)
    monkeypatch.setattr(torch, "fbgemm_linear_fp16_weight_fp32_activation", multiply)
    weight = stored_weight()
    assert pack(weight) is (least is not None)
    packed = find_packed(weight)
    assert (packed.least_rows if packed is not None else None) == least


@has_library
def test_a_library_that_mixes_rows_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = stored_weight()
    monkeypatch.setattr(PackedWeight, "product", lambda self, x: x * len(x))
    assert not pack(weight)
    assert find_packed(weight) is None
