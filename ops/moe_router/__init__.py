"""Router logits to expert ids and weights, the shared expert as the last slot."""

from compiled_mtp.ops.moe_router.reference import moe_router, recorded_router

__all__ = ["moe_router", "recorded_router"]
