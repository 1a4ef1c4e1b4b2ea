"""silu(gate) * up, one launch."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_mtp.ops.device import device_of
from compiled_mtp.ops.variants import KernelVariant

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


def launch(args: Any) -> torch.Tensor:
    gate_up = args.gate_up
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if rows and width:
        grid = (rows, triton.cdiv(width, BLOCK))
        has_pdl = device_of(gate_up.device.index).has_dependent_launch
        # One row may have any stride; another value would compile another kernel.
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


def variants() -> list[KernelVariant]:
    return [
        KernelVariant(
            name=dtype + "-pdl" * pdl,
            function=silu_mul_kernel,
            signature={"gate_up": f"*{dtype}", "out": f"*{dtype}", "row_stride": "i32", "width": "i32"},
            constexprs={"BLOCK": BLOCK, "PDL": pdl},
            num_warps=4,
            aligned=("gate_up", "out", "row_stride", "width"),
            options={**OPTIONS, "launch_pdl": pdl},
            min_capability=90 if pdl else 80,
        )
        for dtype in ("bf16", "fp32")
        for pdl in (True, False)
    ]
