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
    # One division per group: with a rounded reciprocal, one step of Newton gives every quotient that could
    # round to another e4m3 value the bits of a division, without its branch for extreme numbers
    # (tests/ops/test_linear_w8a8.py has all that come near). Of those, an infinite factor needs a finite
    # divisor, so that finite values become 0; quotients that underflow are 0 in e4m3 anyway.
    zero = tl.zeros_like(values)
    inverse = zero + tl.expand_dims(tl.div_rn(tl.zeros_like(scale) + 1.0, scale), AXIS)
    divisor = zero + tl.expand_dims(tl.minimum(scale, 3.4028234663852886e38), AXIS)
    quotient = values * inverse
    # Products with -1, unlike differences from 0, keep a zero's sign.
    quotient = tl.fma(tl.fma(quotient, divisor, values * -1.0), inverse * -1.0, quotient)
    return quotient.to(tl.float8e4nv), scale
