"""Which products of a model have their weights resident in shared memory, and what follows for its norms."""

from __future__ import annotations

from torch import nn

from compiled_mtp.models.layers import Linear, RMSNorm
from compiled_mtp.ops.linear import can_be_resident


def settle_resident(model: nn.Module) -> None:
    """Decide, for every product of a whole model, whether its weight is resident, and tell the norms.

    A resident product is no fence (`Launch`), so norms around it may read early nothing but their weight. In
    a model that quantises rows anywhere no weight is resident: a norm that quantises counts on fences.
    """
    modules = list(model.modules())
    linears = [module for module in modules if isinstance(module, Linear)]
    is_plain = not any(getattr(module, "quantizes_rows", False) for module in modules)
    for linear in linears:
        parts = linear.num_partials if linear.is_before_norm else 0
        is_possible = is_plain and linear.may_be_resident
        linear.resident = is_possible and can_be_resident(linear.weight, parts, linear.is_gated)
    is_any = any(linear.resident for linear in linears)
    for module in modules:
        if isinstance(module, RMSNorm):
            module.resident = is_any
