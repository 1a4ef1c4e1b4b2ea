"""Cases of `linear_w8a8` and `linear_w8a8_parts`: the weights that an FP8 release stores in FP8."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch

from compiled_mtp.ops.fp8 import FP8_BLOCK, dequantize, quantized_values, scale_shape
from compiled_mtp.ops.linear_w8a8 import count_parts, linear_w8a8, linear_w8a8_parts
from compiled_mtp.ops.quantize_rows import quantize_rows
from op_cases import ModelShape, OpCase
from op_cases.linear import BEFORE_NORM, projections, relative_error

# What FP8 products add up inside is imprecise: as much again as the rounding.
MAX_RELATIVE_ERROR = 6e-3


def make_inputs(device: str, seed: int, rows: int, n: int, k: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(rows, k, dtype=torch.bfloat16, device=device, generator=generator)
    weight = torch.randn(n, k, dtype=torch.bfloat16, device=device, generator=generator)
    scale = torch.rand(scale_shape((n, k)), device=device, generator=generator) * 1e-3 + 1e-4
    return *quantize_rows(x), (weight * 50).to(torch.float8_e4m3fn), scale


def call(
    x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, is_before_norm: bool
) -> torch.Tensor:
    if is_before_norm:
        return linear_w8a8_parts(x, x_scale, weight, scale, count_parts(weight, x.shape[0]))
    return linear_w8a8(x, x_scale, weight, scale)


def check(args: tuple[torch.Tensor, ...], is_before_norm: bool) -> None:
    x, x_scale, weight, scale = args
    got = call(x, x_scale, weight, scale, is_before_norm)
    got = got.double().sum(0) if is_before_norm else got
    exact = quantized_values(x, x_scale).double() @ dequantize(weight, scale).double().T
    error = relative_error(got, exact)
    assert error < MAX_RELATIVE_ERROR, f"relative error {error:.1e}"


def cublas(x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """One factor for each matrix: less work than ours, and as many bytes."""
    one = scale.new_ones(())
    return torch._scaled_mm(x, weight.T, one, one, out_dtype=torch.bfloat16)


def cases(shape: ModelShape, rows: int, settings: Mapping[str, int]) -> list[OpCase]:
    """One a weight; parts for the norm that follows where there is one."""
    result = []
    for name, (n, k) in projections(shape, True).items():
        is_before_norm = name in BEFORE_NORM
        result.append(
            OpCase(
                label=f"{name} {n}x{k}",
                make_inputs=functools.partial(make_inputs, rows=rows, n=n, k=k),
                call=functools.partial(call, is_before_norm=is_before_norm),
                bytes_moved=n * k + rows * (k + 4 * k // FP8_BLOCK + 2 * n),
                check=functools.partial(check, is_before_norm=is_before_norm),
                alternative=cublas,
                alternative_name="cuBLAS, one factor",
            )
        )
    return result
