"""x @ weight.T with rows whose bits do not depend on how many rows stand beside them."""

from compiled_mtp.ops.linear.config import count_parts
from compiled_mtp.ops.linear.reference import linear, linear_parts, linear_silu_mul

__all__ = ["count_parts", "linear", "linear_parts", "linear_silu_mul"]
