"""The gated activation of the MLP."""

from compiled_mtp.ops.silu_mul.reference import silu_mul, silu_mul_quantized

__all__ = ["silu_mul", "silu_mul_quantized"]
