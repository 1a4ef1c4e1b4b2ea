"""Tensors derived from weights and kept with them are made again when the weights change."""

from __future__ import annotations

import torch

from compiled_mtp.ops.kept import kept


def test_a_kept_tensor_is_made_again_when_a_weight_changes() -> None:
    calls = []

    def total(weight: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return weight + other

    weight, other = torch.nn.Parameter(torch.ones(2), requires_grad=False), torch.ones(2)
    assert kept(total, weight, other) is kept(total, weight, other)
    weight.mul_(2.0)
    assert kept(total, weight, other).tolist() == [3.0, 3.0]
    other.mul_(3.0)
    assert kept(total, weight, other).tolist() == [5.0, 5.0]
    assert kept(total, weight, torch.zeros(2)).tolist() == [2.0, 2.0]
    assert len(calls) == 4


def test_weights_without_a_write_counter() -> None:
    with torch.inference_mode():
        weight = torch.ones(2)
    assert kept(torch.clone, weight) is kept(torch.clone, weight)
