"""x @ weight.T; the bits of a row do not depend on the number of rows."""

from compiled_mtp.ops.k_splits import NARROW_ROWS
from compiled_mtp.ops.linear.config import count_partials
from compiled_mtp.ops.linear.reference import linear, linear_partials, linear_side, linear_silu_mul
from compiled_mtp.ops.linear.resident_config import can_be_resident

__all__ = [
    "NARROW_ROWS",
    "can_be_resident",
    "count_partials",
    "linear",
    "linear_partials",
    "linear_side",
    "linear_silu_mul",
]
