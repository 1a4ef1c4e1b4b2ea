"""The gated activation of the MLP."""

from compiled_mtp.ops.silu_mul.op import silu_mul

__all__ = ["silu_mul"]
