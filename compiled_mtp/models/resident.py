"""Chooses the products whose weights are resident in shared memory, and tells the model's norms."""

from __future__ import annotations

from torch import nn

from compiled_mtp.models.layers import RMSNorm
from compiled_mtp.models.linear import Linear
from compiled_mtp.ops.linear import can_be_resident


def choose_resident(model: nn.Module) -> None:
    """Set `resident` of every product and every norm of a whole model.

    A resident product is no fence (`Launch`), so norms around it may read early only their weight. A model
    that quantises rows anywhere has no resident weights: a norm that quantises needs fences.
    """
    modules = list(model.modules())
    linears = [module for module in modules if isinstance(module, Linear)]
    is_plain = not any(getattr(module, "quantizes_rows", False) for module in modules)
    for linear in linears:
        num_partials = linear.partial_counts[0] if linear.is_before_norm else 0
        is_possible = is_plain and linear.may_be_resident and linear.parts is None
        linear.resident = is_possible and can_be_resident(linear.weight, num_partials, linear.is_gated)
    is_any = any(linear.resident for linear in linears)
    for module in modules:
        if isinstance(module, RMSNorm):
            module.resident = is_any
