"""RMS norm with and without the residual add: one program a row, one configuration a width."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_mtp.ops.device import device_of
from compiled_mtp.ops.variants import KernelVariant

OPTIONS = {"enable_fp_fusion": True}


@triton.jit
def norm_row(x, weight, column, inside, eps, width: tl.constexpr):
    mean_square = tl.sum(x * x, 0) / width
    factor = 1.0 + tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    return x * tl.rsqrt(mean_square + eps) * factor


@triton.jit
def rms_norm_kernel(
    x, weight, out, x_stride, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    values = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    y = norm_row(values, weight, column, inside, eps, WIDTH)
    tl.store(out + row * WIDTH + column, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def add_rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    new_residual,
    x_stride,
    residual_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    added = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    before = tl.load(residual + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
    rounded = (added + before).to(new_residual.dtype.element_ty)
    tl.store(new_residual + row * WIDTH + column, rounded, mask=inside)
    y = norm_row(rounded.to(tl.float32), weight, column, inside, eps, WIDTH)
    tl.store(out + row * WIDTH + column, y.to(out.dtype.element_ty), mask=inside)


def configuration(width: int) -> tuple[int, int]:
    """Block and warps of a width; never of the number of rows, so that a row's sum keeps its order."""
    block = triton.next_power_of_2(width)
    return block, 4 if block <= 2048 else 8 if block <= 8192 else 16


def launch_options(x: torch.Tensor) -> dict[str, object]:
    """Everything about a launch that follows from the width and the device."""
    block, warps = configuration(x.shape[1])
    has_pdl = device_of(x.device.index).has_dependent_launch
    fixed = {"WIDTH": x.shape[1], "BLOCK": block, "PDL": has_pdl}
    return {**fixed, "num_warps": warps, "launch_pdl": has_pdl, **OPTIONS}


def row_stride(x: torch.Tensor) -> int:
    """One row may have any stride; another value would compile another kernel."""
    return x.stride(0) if x.shape[0] > 1 else x.shape[1]


def launch_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.shape[0]:
        rms_norm_kernel[(x.shape[0],)](x, weight, out, row_stride(x), eps, **launch_options(x))
    return out


def launch_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    new_residual = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.shape[0]:
        strides = (row_stride(x), row_stride(residual))
        add_rms_norm_kernel[(x.shape[0],)](
            x, residual, weight, out, new_residual, *strides, eps, **launch_options(x)
        )
    return out, new_residual


def variants() -> list[KernelVariant]:
    result = []
    for dtype, width, pdl in (
        ("bf16", 5120, True),
        ("bf16", 5120, False),
        ("bf16", 2560, True),
        ("bf16", 2048, True),
        ("bf16", 1024, True),
        ("fp32", 1024, False),
    ):
        block, warps = configuration(width)
        common = {
            "constexprs": {"WIDTH": width, "BLOCK": block, "PDL": pdl},
            "num_warps": warps,
            "options": {**OPTIONS, "launch_pdl": pdl},
            "min_capability": 90 if pdl else 80,
        }
        for name, function, tensors, strides in (
            ("norm", rms_norm_kernel, ("x", "weight", "out"), ("x_stride",)),
            (
                "add-norm",
                add_rms_norm_kernel,
                ("x", "residual", "weight", "out", "new_residual"),
                ("x_stride", "residual_stride"),
            ),
        ):
            types = {**dict.fromkeys(tensors, f"*{dtype}"), **dict.fromkeys(strides, "i32"), "eps": "fp32"}
            result.append(
                KernelVariant(
                    name=f"{name}-{dtype}-{width}" + "-pdl" * pdl,
                    function=function,
                    signature=types,
                    aligned=(*tensors, *strides),
                    **common,
                )
            )
    return result
