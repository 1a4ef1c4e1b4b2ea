"""Cases of `linear_w8a8` and `linear_w8a8_partials`: the weights that an FP8 release stores in FP8."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

import torch

from compiled_mtp.ops.fp8 import FP8_BLOCK, dequantize, quantized_values
from compiled_mtp.ops.linear_w8a8 import count_partials, linear_w8a8, linear_w8a8_partials
from compiled_mtp.ops.quantize_rows import quantize_rows
from op_cases import FP8, LaunchCase, ModelShape, OpCase, tensor
from op_cases.linear import BEFORE_NORM, projections, relative_error
from op_cases.linear import make_inputs as make_weights

# FP8 tensor cores add imprecisely: as large an error again as the rounding's.
MAX_RELATIVE_ERROR = 6e-3


def make_inputs(device: str, seed: int, rows: int, n: int, k: int) -> tuple[torch.Tensor | None, ...]:
    x, weight, scale = make_weights(device, seed, rows, n, k, True)
    assert x is not None
    return *quantize_rows(x), weight, scale


def call(
    x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, is_before_norm: bool
) -> torch.Tensor:
    if is_before_norm:
        return linear_w8a8_partials(x, x_scale, weight, scale, count_partials(weight, x.shape[0]))
    return linear_w8a8(x, x_scale, weight, scale)


def check(args: tuple[torch.Tensor, ...], is_before_norm: bool) -> None:
    x, x_scale, weight, scale = args
    got = call(x, x_scale, weight, scale, is_before_norm)
    got = got.double().sum(0) if is_before_norm else got
    exact = quantized_values(x, x_scale).double() @ dequantize(weight, scale).double().T
    error = relative_error(got, exact)
    assert error < MAX_RELATIVE_ERROR, f"relative error {error:.1e}"


def cublas(x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Run cuBLAS with one factor per matrix: less work than our operator, and as many bytes."""
    one = scale.new_ones(())
    return torch._scaled_mm(x, weight.T, one, one, out_dtype=torch.bfloat16)


def cases(shape: ModelShape, rows: int, settings: Mapping[str, int]) -> list[OpCase]:
    """Return one case per weight, with partials if a norm follows the product."""
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


def w8a8_product(device: torch.device, rows: int, n: int, k: int, count: int, gap: int = 0) -> None:
    """Call linear_w8a8 (count 0) or linear_w8a8_partials with `count` partials; gap: bytes between rows."""
    x, weight = tensor(device, rows, k + gap, dtype=FP8)[:, :k], tensor(device, n, k, dtype=FP8)
    scales = tensor(device, rows, k // 128), tensor(device, -(-n // 128), k // 128)
    if count:
        linear_w8a8_partials(x, scales[0], weight, scales[1], count)
    else:
        linear_w8a8(x, scales[0], weight, scales[1])


def launches(capability: int) -> Iterator[LaunchCase]:
    """Yield each tile height, whole and with each number of partials."""
    for rows in (4, 20, 50, 100):
        for n, k, counts in ((34816, 5120, (0,)), (5120, 17408, (1, 2, 4, 8))):
            for count in counts:
                call = functools.partial(w8a8_product, rows=rows, n=n, k=k, count=count)
                yield LaunchCase(f"{n}x{k}-{rows}" + f"-parts{count}" * (count > 0), call, 90)

    for rows, n, k, counts in (
        (20, 16384, 5120, (0,)),
        (200, 34816, 5120, (0,)),
        (2048, 34816, 5120, (0,)),
        # More rows than persistent programs have.
        (5000, 34816, 5120, (0,)),
        (100, 5120, 6144, (1, 2, 4, 8)),
        (200, 5120, 17408, (4,)),
        (5000, 5120, 17408, (0,)),
    ):
        for count in counts:
            call = functools.partial(w8a8_product, rows=rows, n=n, k=k, count=count)
            yield LaunchCase(f"large-m-{n}x{k}-{rows}" + f"-parts{count}" * (count > 0), call, 90)
    # Rows that do not start at multiples of 16 bytes.
    for rows in (20, 50, 100):
        for count in (0, 1, 4):
            call = functools.partial(w8a8_product, rows=rows, n=5120, k=17408, count=count, gap=8)
            yield LaunchCase(f"unaligned-{rows}" + f"-parts{count}" * (count > 0), call, 90)
