"""The two products on a CPU: those of `moe_experts`, each by itself."""

from __future__ import annotations

import torch

from compiled_mtp.ops.fp8 import quantize, quantized_values
from compiled_mtp.ops.moe_experts.cpu import multiply_down, multiply_gate_up
from compiled_mtp.ops.shares import cpu_share_count


def moe_hidden(
    x: torch.Tensor, ids: torch.Tensor, gate_up: torch.Tensor, gate_up_scale: torch.Tensor | None
) -> torch.Tensor:
    return multiply_gate_up(x, ids, gate_up, gate_up_scale).to(x.dtype)


def moe_sums(
    hidden: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    down: torch.Tensor,
    down_scale: torch.Tensor | None,
) -> torch.Tensor:
    shares = cpu_share_count(down.shape[2])
    return multiply_down(hidden, weights, ids, down, down_scale, shares).to(hidden.dtype)


def moe_hidden_w8a8(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    ids: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor | None,
    out_float32: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = multiply_gate_up(quantized_values(x, x_scale), ids, gate_up, gate_up_scale)
    return quantize(hidden if out_float32 else hidden.bfloat16())


def moe_sums_w8a8(
    hidden: torch.Tensor,
    hidden_scale: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    down: torch.Tensor,
    down_scale: torch.Tensor | None,
    out_float32: bool,
) -> torch.Tensor:
    values = quantized_values(hidden, hidden_scale)
    total = multiply_down(values, weights, ids, down, down_scale)
    return total if out_float32 else total.bfloat16()
