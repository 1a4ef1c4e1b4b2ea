"""x @ weight.T with rows whose bits do not depend on how many rows stand beside them."""

from compiled_mtp.ops.linear.op import linear, linear_parts, linear_silu_mul

__all__ = ["linear", "linear_parts", "linear_silu_mul"]
