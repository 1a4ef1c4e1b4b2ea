"""RMS norm with and without the residual add: one program a row, one configuration a width."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compiled_mtp.ops.variants import KernelVariant

OPTIONS = {"enable_fp_fusion": True}


@triton.jit
def norm_row(x, weight, column, inside, eps, width: tl.constexpr):
    mean_square = tl.sum(x * x, 0) / width
    factor = 1.0 + tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    return x * tl.rsqrt(mean_square + eps) * factor


@triton.jit
def rms_norm_kernel(x, weight, out, x_stride, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
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
):
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


def launch_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    rows, width = x.shape
    block, warps = configuration(width)
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if rows:
        rms_norm_kernel[(rows,)](
            x, weight, out, x.stride(0), eps, WIDTH=width, BLOCK=block, num_warps=warps, **OPTIONS
        )
    return out


def launch_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, width = x.shape
    block, warps = configuration(width)
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    new_residual = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if rows:
        add_rms_norm_kernel[(rows,)](
            x,
            residual,
            weight,
            out,
            new_residual,
            x.stride(0),
            residual.stride(0),
            eps,
            WIDTH=width,
            BLOCK=block,
            num_warps=warps,
            **OPTIONS,
        )
    return out, new_residual


def variants() -> list[KernelVariant]:
    result = []
    for dtype, width in (("bf16", 5120), ("bf16", 2560), ("bf16", 2048), ("bf16", 1024), ("fp32", 1024)):
        block, warps = configuration(width)
        pointer = f"*{dtype}"
        shared = {"num_warps": warps, "options": OPTIONS, "constexprs": {"WIDTH": width, "BLOCK": block}}
        tensors = ("x", "weight", "out")
        result.append(
            KernelVariant(
                name=f"norm-{dtype}-{width}",
                function=rms_norm_kernel,
                signature={**dict.fromkeys(tensors, pointer), "x_stride": "i32", "eps": "fp32"},
                aligned=(*tensors, "x_stride"),
                **shared,
            )
        )
        tensors = ("x", "residual", "weight", "out", "new_residual")
        strides = ("x_stride", "residual_stride")
        result.append(
            KernelVariant(
                name=f"add-norm-{dtype}-{width}",
                function=add_rms_norm_kernel,
                signature={**dict.fromkeys(tensors, pointer), **dict.fromkeys(strides, "i32"), "eps": "fp32"},
                aligned=(*tensors, *strides),
                **shared,
            )
        )
    return result
