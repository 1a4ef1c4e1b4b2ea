"""The experts of a mixture, shared expert included, for any number of rows."""

from compiled_mtp.ops.moe_experts.reference import moe_experts, moe_experts_w8a8

__all__ = ["moe_experts", "moe_experts_w8a8"]
