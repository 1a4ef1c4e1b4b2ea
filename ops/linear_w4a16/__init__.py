"""x @ weight.T with four-bit weights and rows as they are."""

from compiled_mtp.ops.linear_w4a16.reference import (
    linear_w4a16,
    linear_w4a16_partials,
    linear_w4a16_silu_mul,
)

__all__ = ["linear_w4a16", "linear_w4a16_partials", "linear_w4a16_silu_mul"]
