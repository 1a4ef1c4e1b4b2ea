"""Modules whose parts Python finds by itself: a round that runs as it is asks for some hundred of them."""

from __future__ import annotations

from torch import nn


def reach_directly(model: nn.Module) -> None:
    """Put every parameter, buffer and submodule of `model` beside its plain attributes too.

    nn.Module keeps them apart, and finds one in 0.7 us where Python takes 0.05. What is assigned to a
    parameter's or a submodule's name later is found as before. Not for what is traced.
    """
    for module in model.modules():
        for parts in (module._parameters, module._buffers, module._modules):
            module.__dict__.update(parts)
