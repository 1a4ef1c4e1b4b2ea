"""linear: row-invariant products with bf16, float32 and FP8 block-128 weights."""

from __future__ import annotations

import pytest
import torch

from compiled_mtp.ops.linear import linear


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


def test_bad_arguments_raise() -> None:
    x, weight = torch.zeros(2, 8), torch.zeros(4, 8)
    with pytest.raises(ValueError, match="x must have shape"):
        linear(x, torch.zeros(4, 9))
    with pytest.raises(ValueError, match="x must have dtype"):
        linear(x.half(), weight.half())
    with pytest.raises(ValueError, match="weight must have dtype"):
        linear(x, weight.bfloat16())
    with pytest.raises(ValueError, match="stride 1"):
        linear(x, torch.zeros(8, 4).t())
    fp8 = weight.to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="weight_scale must be given"):
        linear(x, fp8)
    with pytest.raises(ValueError, match="weight_scale must have shape"):
        linear(x, fp8, torch.ones(2, 1))
    with pytest.raises(ValueError, match="weight_scale must have dtype"):
        linear(x, fp8, torch.ones(1, 1).bfloat16())
    with pytest.raises(ValueError, match="weight_scale must be None"):
        linear(x, weight, torch.ones(1, 1))
