"""x @ weight.T with rows whose bits do not depend on how many rows stand beside them."""

from compiled_mtp.ops.linear.config import count_parts
from compiled_mtp.ops.linear.reference import linear, linear_parts, linear_side, linear_silu_mul
from compiled_mtp.ops.linear.resident_config import can_be_resident
from compiled_mtp.ops.shares import NARROW_ROWS

__all__ = [
    "NARROW_ROWS",
    "can_be_resident",
    "count_parts",
    "linear",
    "linear_parts",
    "linear_side",
    "linear_silu_mul",
]
