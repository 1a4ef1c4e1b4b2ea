"""x @ weight.T with rows whose bits do not depend on how many rows stand beside them."""

from compiled_mtp.ops.linear.config import count_parts
from compiled_mtp.ops.linear.held_config import holds
from compiled_mtp.ops.linear.reference import linear, linear_beside, linear_parts, linear_silu_mul
from compiled_mtp.ops.shares import NARROW_ROWS

__all__ = [
    "NARROW_ROWS",
    "count_parts",
    "holds",
    "linear",
    "linear_beside",
    "linear_parts",
    "linear_silu_mul",
]
