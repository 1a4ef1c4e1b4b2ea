"""Mixture of experts: one router with the shared expert's gate as its last row, one stack with it as expert
E."""

from __future__ import annotations

import torch
from torch import nn

from compiled_mtp.model_config import ModelConfig
from compiled_mtp.models.activations import Activations, as_they_are, quantized
from compiled_mtp.models.rows import PrefillRows, Rows
from compiled_mtp.models.weight_format import ParameterFactory
from compiled_mtp.ops.linear import linear
from compiled_mtp.ops.moe_experts import moe_experts, moe_experts_w8a8
from compiled_mtp.ops.moe_router import moe_router


class Router(nn.Module):
    """Rows 0..E-1 score the routed experts, row E is the shared expert's gate; weight [E + 1, hidden]."""

    def __init__(self, make: ParameterFactory, config: ModelConfig) -> None:
        super().__init__()
        self.weight = make.empty(config.num_experts + 1, config.hidden_size)

    def forward(self, x: torch.Tensor, rows: Rows) -> torch.Tensor:
        return linear(x, self.weight, None, True, isinstance(rows, PrefillRows))


class MoE(nn.Module):
    """sum over the top-k experts of p_e down_e(silu(gate_e x) * up_e x), plus the gated shared expert.

    The stacks `gate_up` [E + 1, 2 * width, hidden] and `down` [E + 1, hidden, width] have one format; where
    it has factors, `gate_up_scale` and `down_scale` hold those of each expert, else they are None. Of several
    ranks each holds some neighbouring rows and columns of every expert; `forward` then gives the ranks' parts
    [P, M, hidden], which the norm adds up, and else the sums [M, hidden].
    """

    gate_up: nn.Parameter
    down: nn.Parameter
    gate_up_scale: nn.Parameter | None
    down_scale: nn.Parameter | None

    def __init__(self, make: ParameterFactory, config: ModelConfig) -> None:
        super().__init__()
        experts, width, hidden = config.num_experts + 1, config.moe_intermediate_size, config.hidden_size
        self.top_k = config.num_experts_per_tok
        self.renormalize = config.norm_topk_prob
        self.exchange = make.exchange
        self.whole_width = 0 if make.exchange is None else width * make.exchange.world
        self.router = Router(make.part("router"), config)
        make.add_weight(self, "gate_up", experts, 2 * width, hidden)
        make.add_weight(self, "down", experts, hidden, width)
        self.quantizes_rows = make.format_of("gate_up").quantizes_rows
        self.is_float32 = make.dtype == torch.float32

    def forward(self, x: Activations, rows: Rows) -> torch.Tensor:
        weights, ids = moe_router(self.router(as_they_are(x), rows), self.top_k, self.renormalize)
        scales = (self.gate_up_scale, self.down_scale)
        if self.quantizes_rows:
            stacks = (self.gate_up, self.down)
            return moe_experts_w8a8(*quantized(x), weights, ids, *stacks, *scales, self.is_float32)
        stacks, place = (self.gate_up, self.down), (isinstance(rows, PrefillRows), self.whole_width)
        y = moe_experts(as_they_are(x), weights, ids, *stacks, *scales, *place)
        return y if self.exchange is None else self.exchange.gather(y)
