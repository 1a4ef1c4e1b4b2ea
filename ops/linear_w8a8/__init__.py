"""x @ weight.T with FP8 weights and quantised activations, multiplied in FP8."""

from compiled_mtp.ops.linear_w8a8.config import count_parts
from compiled_mtp.ops.linear_w8a8.reference import linear_w8a8, linear_w8a8_parts

__all__ = ["count_parts", "linear_w8a8", "linear_w8a8_parts"]
