"""Mixture of experts: one router with the shared expert's gate as its last row, one stack with it as expert
E."""

from __future__ import annotations

import torch
from torch import nn

from compiled_mtp.config import ModelConfig
from compiled_mtp.ops.linear import linear
from compiled_mtp.ops.moe_experts import moe_experts
from compiled_mtp.ops.moe_router import moe_router


class Router(nn.Module):
    """Rows 0..E-1 score the routed experts, row E is the shared expert's gate; weight [E + 1, hidden]."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        shape = (config.num_experts + 1, config.hidden_size)
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)

    def forward(self, x: torch.Tensor, is_prefill: bool) -> torch.Tensor:
        return linear(x, self.weight, None, True, is_prefill)


class MoE(nn.Module):
    """sum over the top-k experts of p_e down_e(silu(gate_e x) * up_e x), plus the gated shared expert."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        experts, width, hidden = config.num_experts + 1, config.moe_intermediate_size, config.hidden_size
        self.top_k = config.num_experts_per_tok
        self.renormalize = config.norm_topk_prob
        self.router = Router(config, dtype, device)
        gate_up = torch.empty((experts, 2 * width, hidden), dtype=dtype, device=device)
        down = torch.empty((experts, hidden, width), dtype=dtype, device=device)
        self.gate_up = nn.Parameter(gate_up, requires_grad=False)
        self.down = nn.Parameter(down, requires_grad=False)

    def forward(self, x: torch.Tensor, is_prefill: bool) -> torch.Tensor:
        weights, ids = moe_router(self.router(x, is_prefill), self.top_k, self.renormalize)
        return moe_experts(x, weights, ids, self.gate_up, self.down, None, None)
