"""The gated activation of the MLP."""

from compiled_mtp.ops.silu_mul.reference import silu_mul

__all__ = ["silu_mul"]
