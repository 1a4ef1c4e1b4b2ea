"""The experts of a mixture, shared expert included, for any number of rows; and their two products apart."""

from compiled_mtp.ops.moe_experts.blocks import moe_experts_blocks
from compiled_mtp.ops.moe_experts.halves import moe_hidden, moe_hidden_w8a8, moe_sums, moe_sums_w8a8
from compiled_mtp.ops.moe_experts.reference import moe_experts, moe_experts_w8a8
from compiled_mtp.ops.moe_experts.w4a16 import moe_experts_w4a16, moe_hidden_w4a16, moe_sums_w4a16

__all__ = [
    "moe_experts",
    "moe_experts_blocks",
    "moe_experts_w4a16",
    "moe_experts_w8a8",
    "moe_hidden",
    "moe_hidden_w4a16",
    "moe_hidden_w8a8",
    "moe_sums",
    "moe_sums_w4a16",
    "moe_sums_w8a8",
]
