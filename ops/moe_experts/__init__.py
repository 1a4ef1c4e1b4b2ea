"""The experts of a mixture, shared expert included, for any number of rows."""

from compiled_mtp.ops.moe_experts.reference import moe_experts

__all__ = ["moe_experts"]
