"""silu(gate) * up, one launch."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_mtp.ops.device import device_of
from compiled_mtp.ops.fp8_triton import quantize_groups

BLOCK = 1024
OPTIONS = {"enable_fp_fusion": True}


@triton.jit
def silu_mul_kernel(gate_up, out, row_stride, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at = gate_up + row * row_stride + column
    gate = tl.load(at, mask=inside).to(tl.float32)
    up = tl.load(at + width, mask=inside).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * width + column, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def silu_mul_quantized_kernel(
    gate_up, out, scale, row_stride, width, GROUPS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = column < width
    at = gate_up + row * row_stride + column
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    quantized, factors = quantize_groups(y.to(gate_up.dtype.element_ty).to(tl.float32), 1)
    tl.store(out + row * width + column, quantized, mask=inside)
    tl.store(scale + row * (width // 128) + group, factors, mask=group * 128 < width)


def launch(args: Any) -> torch.Tensor:
    gate_up = args.gate_up
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if rows and width:
        grid = (rows, triton.cdiv(width, BLOCK))
        has_pdl = device_of(gate_up.device.index).has_dependent_launch
        # A single row may have any stride: pass the width, because other values would compile another kernel.
        row_stride = gate_up.stride(0) if rows > 1 else 2 * width
        silu_mul_kernel[grid](
            gate_up,
            out,
            row_stride,
            width,
            BLOCK=BLOCK,
            PDL=has_pdl,
            num_warps=4,
            launch_pdl=has_pdl,
            **OPTIONS,
        )
    return out


def launch_silu_mul_quantized(args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    gate_up = args.gate_up
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=torch.float8_e4m3fn, device=gate_up.device)
    scale = torch.empty((rows, width // 128), dtype=torch.float32, device=gate_up.device)
    if rows:
        has_pdl = device_of(gate_up.device.index).has_dependent_launch
        silu_mul_quantized_kernel[(rows, triton.cdiv(width, BLOCK))](
            gate_up,
            out,
            scale,
            gate_up.stride(0) if rows > 1 else 2 * width,
            width,
            GROUPS=BLOCK // 128,
            PDL=has_pdl,
            num_warps=4,
            launch_pdl=has_pdl,
            **OPTIONS,
        )
    return out, scale
