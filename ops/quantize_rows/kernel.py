"""Quantize activations to e4m3: a program takes eight independent groups of a row."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_mtp.ops.device import device_of
from compiled_mtp.ops.fp8_triton import quantize_groups

OPTIONS = {"enable_fp_fusion": True}
GROUPS = 8
WARPS = 4


# One binary for every width: Triton would specialise on 1 and on multiples of 16.
@triton.jit(do_not_specialize=["groups"])
def quantize_rows_kernel(x, out, scale, x_stride, groups, GROUPS: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    is_column = column < groups * 128
    values = tl.load(x + row * x_stride + column, mask=is_column, other=0.0).to(tl.float32)
    quantized, factors = quantize_groups(values, 1)
    tl.store(out + row * groups * 128 + column, quantized, mask=is_column)
    tl.store(scale + row * groups + group, factors, mask=group < groups)


def launch(args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    x = args.x
    rows, columns = x.shape
    groups = columns // 128
    out = torch.empty((rows, columns), dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty((rows, groups), dtype=torch.float32, device=x.device)
    if rows:
        has_pdl = device_of(x.device.index).has_dependent_launch
        quantize_rows_kernel[(rows, triton.cdiv(groups, GROUPS))](
            x, out, scale, x.stride(0) if rows > 1 else columns, groups,
            GROUPS=GROUPS, PDL=has_pdl, num_warps=WARPS, launch_pdl=has_pdl, **OPTIONS,
        )  # fmt: skip
    return out, scale
