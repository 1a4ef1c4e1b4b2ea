"""x @ weight.T with weights in blocks of scaled codes and rows as they are."""

from compiled_mtp.ops.linear_blocks.reference import (
    block_rows,
    linear_blocks,
    linear_blocks_partials,
    linear_blocks_silu_mul,
)

__all__ = [
    "block_rows",
    "linear_blocks",
    "linear_blocks_partials",
    "linear_blocks_silu_mul",
]
