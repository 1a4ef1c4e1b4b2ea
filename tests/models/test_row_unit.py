"""The engine measures at which row counts a matrix library changes a row's bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from compiled_mtp.models import row_unit
from compiled_mtp.models.row_unit import find_row_unit
from compiled_mtp.ops.linear import linear

ROW_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


def library(depends: Callable[[int], bool]) -> Callable[..., torch.Tensor]:
    """Return a `linear` that sums in another order for each number of rows for which `depends` is true."""

    def multiply(x: torch.Tensor, weight: torch.Tensor, scale: Any, out_float32: bool, prefill: bool) -> Any:
        if not depends(x.shape[0]):
            return linear(x, weight, scale, out_float32, prefill)
        half = x.shape[1] // 2
        first, second = (
            linear(x[:, part].contiguous(), weight[:, part].contiguous(), None, True, prefill)
            for part in (slice(0, half), slice(half, None))
        )
        return (first + second).to(torch.float32 if out_float32 else x.dtype)

    return multiply


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n, k", [(8, 32), (64, 48), (512, 96)])
@pytest.mark.parametrize(
    ("depends", "unit"),
    [
        (lambda rows: False, 1),
        (lambda rows: rows == 1, 2),
        (lambda rows: rows % 4 > 0, 4),
        (lambda rows: rows == 4, 8),
        (lambda rows: rows == 24, None),
    ],
)
def test_a_change_of_order_is_found(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    n: int,
    k: int,
    depends: Callable[[int], bool],
    unit: int | None,
) -> None:
    """One small matrix is enough, even if results are rounded to bfloat16."""
    monkeypatch.setattr(row_unit, "linear", library(depends))
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert find_row_unit([weight], ROW_COUNTS) == unit


def test_both_outputs_of_a_bfloat16_matrix_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the rounded result depends on the rows; with random numbers, one result in thousands would show
    it."""

    def multiply(x: torch.Tensor, weight: torch.Tensor, scale: Any, out_float32: bool, prefill: bool) -> Any:
        depends = not out_float32 and x.shape[0] == 1
        return library(lambda rows: depends)(x, weight, scale, out_float32, prefill)

    monkeypatch.setattr(row_unit, "linear", multiply)
    weight = torch.randn(64, 48, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert find_row_unit([weight], ROW_COUNTS) == 2
