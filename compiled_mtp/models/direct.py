"""Fast attribute access to modules' parameters: an uncompiled round reads some hundred of them."""

from __future__ import annotations

from torch import nn


def reach_directly(model: nn.Module) -> None:
    """Make every parameter, buffer and submodule of `model` a plain attribute of its module too.

    nn.Module keeps them in dictionaries of its own and finds one in 0.7 us, a plain attribute takes 0.05 us.
    A later assignment to a parameter's or submodule's name still works. Do not use it for code that is
    traced. Mutates the modules' `__dict__`.
    """
    for module in model.modules():
        for parts in (module._parameters, module._buffers, module._modules):
            module.__dict__.update(parts)
