"""x @ weight.T with FP8 weights and quantised activations, multiplied in FP8."""

from compiled_mtp.ops.linear_w8a8.config import count_partials
from compiled_mtp.ops.linear_w8a8.reference import linear_w8a8, linear_w8a8_partials

__all__ = ["count_partials", "linear_w8a8", "linear_w8a8_partials"]
