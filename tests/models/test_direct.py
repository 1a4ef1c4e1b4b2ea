"""Modules that find their submodules without `__getattr__` behave like other modules."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from compiled_mtp.models.direct import reach_directly


def test_submodules_are_found_without_a_search_and_can_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.BatchNorm1d(2))
    names = list(model.state_dict())
    reach_directly(model)
    monkeypatch.setattr(nn.Module, "__getattr__", lambda self, name: pytest.fail(name))
    linear, norm = model._modules.values()
    assert linear.weight is linear._parameters["weight"]  # type: ignore[union-attr]
    assert linear.bias is None  # type: ignore[union-attr]
    assert norm.running_mean is norm._buffers["running_mean"]  # type: ignore[union-attr]
    monkeypatch.undo()
    model[0].weight = nn.Parameter(torch.zeros(2, 3))
    assert torch.equal(model[0](torch.ones(1, 3)), torch.zeros(1, 2))
    model[0] = nn.Identity()
    assert list(model.state_dict()) == names[1:]
    assert isinstance(model.get_submodule("0"), nn.Identity)
