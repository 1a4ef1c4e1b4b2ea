"""silu_mul: silu(gate) * up."""

from __future__ import annotations

import pytest
import torch

from compiled_mtp.ops.quantize_rows import quantize_rows
from compiled_mtp.ops.silu_mul import silu_mul, silu_mul_quantized
from tests.ops.harness import (
    assert_same_bits,
    check_compiles,
    check_launch,
    check_registration,
    check_row_invariance,
    poisoned_allocations,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 37, 512])
def test_equals_float64(dtype: torch.dtype, width: int) -> None:
    gate_up = torch.randn(5, 2 * width, dtype=dtype) * 4
    gate, up = gate_up.double().chunk(2, -1)
    wanted = gate * torch.sigmoid(gate) * up
    torch.testing.assert_close(silu_mul(gate_up), wanted.to(dtype))


def test_extremes_stay_finite() -> None:
    gate_up = torch.tensor([[-200.0, -80.0, 0.0, 200.0, 2.0, 2.0, 2.0, 2.0]])
    torch.testing.assert_close(silu_mul(gate_up), torch.tensor([[0.0, 0.0, 0.0, 400.0]]))


def test_bad_arguments_raise() -> None:
    with pytest.raises(ValueError, match="even number of columns"):
        silu_mul(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="gate_up must have shape"):
        silu_mul(torch.zeros(2, 3, 4))
    with pytest.raises(ValueError, match="gate_up must have dtype"):
        silu_mul(torch.zeros(2, 4, dtype=torch.float16))
    with pytest.raises(ValueError, match="stride 1"):
        silu_mul(torch.zeros(4, 2).t())


def test_registration_and_compile() -> None:
    cases = [(torch.randn(m, 2 * i),) for m, i in ((3, 8), (5, 12))]
    check_registration(torch.ops.compiled_mtp.silu_mul.default, cases[0])
    check_compiles(silu_mul, cases)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_do_not_depend_on_each_other(dtype: torch.dtype) -> None:
    gate_up = torch.randn(70, 2 * 37, dtype=dtype)
    check_row_invariance(lambda m: silu_mul(gate_up[:m]), range(1, 70), 70)


@pytest.mark.parametrize("dtype, rtol", [(torch.float32, 1e-6), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize("width", [37, 1500])
def test_kernel_in_interpreter(interpreter: None, dtype: torch.dtype, rtol: float, width: int) -> None:
    wide = torch.randn(3, 2 * width + 5, dtype=dtype)
    wide[:, 2 * width :] = float("nan")
    check_launch(silu_mul, (wide[:, : 2 * width],), rtol=rtol, atol=1e-7)


def test_quantised_is_one_after_the_other(interpreter: None) -> None:
    """The operator and its kernel give the bits of the product and then the quantisation, for rows of any
    stride."""
    for dtype, width in ((torch.bfloat16, 1152), (torch.float32, 128)):
        wide = torch.randn(3, 2 * width + 8, dtype=dtype)
        wide[:, 2 * width :] = float("nan")
        gate_up = wide[:, : 2 * width]
        assert_same_bits(silu_mul_quantized(gate_up), quantize_rows(silu_mul(gate_up)))
        with poisoned_allocations():
            got = silu_mul_quantized.launch(gate_up)
        assert_same_bits(got, quantize_rows.launch(silu_mul.launch(gate_up)))
    torch.library.opcheck(silu_mul_quantized.overload, (gate_up,))
    with pytest.raises(ValueError, match="gate_up must have a multiple of 256 columns, got 128; use"):
        silu_mul_quantized(gate_up[:, :128])
