"""Quantising groups of 128 values in a kernel, with the bits of ops/fp8.py."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def quantize_groups(values, AXIS: tl.constexpr):
    """(e4m3 values, factors) of float32 groups that lie along `AXIS` of two: a factor is the largest
    magnitude over 448."""
    scale = tl.maximum(tl.max(tl.abs(values), AXIS), 1e-10) * (1 / 448)
    divisor = tl.zeros_like(values) + tl.expand_dims(scale, AXIS)
    return tl.div_rn(values, divisor).to(tl.float8e4nv), scale
