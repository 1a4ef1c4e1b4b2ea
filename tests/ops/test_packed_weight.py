"""Weights in half precision beside themselves: exact or not at all, and a row's bits are its own."""

from __future__ import annotations

import pytest
import torch

from compiled_mtp.ops import packed_weight
from compiled_mtp.ops.linear import linear
from compiled_mtp.ops.packed_weight import PackedWeight, find_packed, pack
from tests.ops.gdn_cases import torch_threads
from tests.ops.harness import check_row_invariance

has_library = pytest.mark.skipif(
    "fbgemm" not in torch.backends.quantized.supported_engines, reason="this torch has no fbgemm"
)


def stored_weight(rows: int = 1400, columns: int = 96) -> torch.Tensor:
    """As a checkpoint in bfloat16 stores it, and as an engine in float32 holds it."""
    return (torch.randn(rows, columns) * 0.02).bfloat16().float()


@has_library
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_packed_weight_multiplies_as_itself_and_rows_keep_their_bits(threads: int) -> None:
    x, weight = torch.randn(70, 96), stored_weight()
    assert pack(weight)
    with torch_threads(threads):
        torch.testing.assert_close(
            linear(x, weight).double(), x.double() @ weight.double().T, rtol=0, atol=1e-6
        )
        check_row_invariance(lambda m: linear(x[:m], weight), range(1, 70), 70)


@has_library
def test_compiled_code_finds_what_was_packed() -> None:
    x, weight = torch.randn(4, 96), torch.nn.Parameter(stored_weight(), requires_grad=False)
    assert pack(weight)
    plain, packed = linear(x, weight), find_packed(weight)
    assert packed is not None
    weight.packed = PackedWeight(packed.matrix, 2.0 * packed.factor)  # type: ignore[attr-defined]
    assert torch.equal(linear(x, weight), 2.0 * plain)
    assert torch.equal(linear.overload(x, weight, None, False, False, 0, 0), 2.0 * plain)


def test_what_is_not_exact_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = stored_weight()
    wide[0, 0], wide[0, 1] = 1e-9, 1e9
    infinite = stored_weight()
    infinite[3, 5] = -torch.inf
    for weight in (
        torch.randn(700, 96),
        stored_weight(64),
        stored_weight().bfloat16(),
        wide,
        infinite,
        stored_weight() * torch.nan,
    ):
        assert not pack(weight)
        assert find_packed(weight) is None
    monkeypatch.setattr(packed_weight, "MOST_ELEMENTS", 96)
    assert not pack(stored_weight())


@has_library
def test_a_library_that_mixes_rows_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = stored_weight()
    monkeypatch.setattr(PackedWeight, "product", lambda self, x: x * len(x))
    assert not pack(weight)
    assert find_packed(weight) is None
