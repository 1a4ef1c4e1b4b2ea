"""Quantises groups of 128 values in a kernel, with the same bits as `quantize` of ops/fp8.py."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def quantize_groups(values, AXIS: tl.constexpr):
    """Return (e4m3 values, factors) of a float32 matrix whose groups lie along `AXIS`, 0 or 1.

    A factor is the largest magnitude of a group / 448.
    """
    scale = tl.maximum(tl.max(tl.abs(values), AXIS), 1e-10) * (1 / 448)
    divisor = tl.zeros_like(values) + tl.expand_dims(scale, AXIS)
    return tl.div_rn(values, divisor).to(tl.float8e4nv), scale
