"""Mixture of experts. The shared expert is expert E of the stacks, and its gate is the router's last row."""

from __future__ import annotations

import torch
from torch import nn

from compiled_mtp.communicators.communicator import Communicator
from compiled_mtp.model_config import ModelConfig
from compiled_mtp.models.activations import Activations, plain, quantized
from compiled_mtp.models.rows import PrefillRows, Rows
from compiled_mtp.models.weight_format import ParameterFactory
from compiled_mtp.ops.linear import linear
from compiled_mtp.ops.moe_experts import (
    moe_experts,
    moe_experts_w8a8,
    moe_hidden,
    moe_hidden_w8a8,
    moe_sums,
    moe_sums_w8a8,
)
from compiled_mtp.ops.moe_router import moe_router


class Router(nn.Module):
    """Scores the routed experts by rows 0..E-1 and gates the shared one by row E; weight [E + 1, hidden]."""

    def __init__(self, make: ParameterFactory, config: ModelConfig) -> None:
        super().__init__()
        self.weight = make.empty(config.num_experts + 1, config.hidden_size)

    def forward(self, x: torch.Tensor, rows: Rows) -> torch.Tensor:
        return linear(x, self.weight, None, True, isinstance(rows, PrefillRows))


class MoE(nn.Module):
    """sum over the top-k experts of p_e down_e(silu(gate_e x) * up_e x), plus the gated shared expert.

    The stacks `gate_up` [E + 1, 2 * width, hidden] and `down` [E + 1, hidden, width] have one format. If it
    has factors, `gate_up_scale` and `down_scale` hold those of each expert, else they are None.

    `forward` returns sums [M, hidden]. With several ranks each holds a share of every expert's width, in
    gate, up and down, and `forward` returns one partial per rank [P, M, hidden], which the norm adds. For
    quantised rows, and for prompts that are summed without K splits, the ranks gather the hidden values
    instead, and each computes the columns of its rows of down (`prompt_down`, or `down` itself).
    """

    gate_up: nn.Parameter
    down: nn.Parameter
    gate_up_scale: nn.Parameter | None
    down_scale: nn.Parameter | None
    prompt_down: nn.Parameter
    prompt_down_scale: nn.Parameter | None

    def __init__(self, make: ParameterFactory, config: ModelConfig) -> None:
        super().__init__()
        experts, width, hidden = config.num_experts + 1, config.moe_intermediate_size, config.hidden_size
        self.top_k = config.num_experts_per_tok
        self.renormalize = config.norm_topk_prob
        self.communicator = communicator = make.communicator
        world = 1 if communicator is None else communicator.world
        self.whole_width = 0 if communicator is None else width * world
        self.router = Router(make.part("router"), config)
        make.add_weight(self, "gate_up", experts, 2 * width, hidden)
        self.quantizes_rows = make.format_of("gate_up").quantizes_rows
        some_rows = (experts, hidden // world, width * world)
        make.add_weight(self, "down", *(some_rows if self.quantizes_rows else (experts, hidden, width)))
        keeps_prompt_rows = communicator is not None and communicator.keeps_prompt_rows
        self.has_prompt_rows = keeps_prompt_rows and not self.quantizes_rows
        if self.has_prompt_rows:
            make.add_weight(self, "prompt_down", *some_rows, like="down")
        self.is_float32 = make.dtype == torch.float32

    def forward(self, x: Activations, rows: Rows) -> torch.Tensor:
        weights, ids = moe_router(self.router(plain(x), rows), self.top_k, self.renormalize)
        stacks, scales = (self.gate_up, self.down), (self.gate_up_scale, self.down_scale)
        is_prefill, communicator = isinstance(rows, PrefillRows), self.communicator
        if self.quantizes_rows and communicator is None:
            return moe_experts_w8a8(*quantized(x), weights, ids, *stacks, *scales, self.is_float32)
        if communicator is not None and (self.quantizes_rows or (is_prefill and self.has_prompt_rows)):
            return communicator.gather_columns(self._some_sums(x, weights, ids, communicator))
        x = plain(x)
        y = moe_experts(x, weights, ids, *stacks, *scales, is_prefill, self.whole_width)
        return y if communicator is None else communicator.gather_partials(y[None], x.dtype)

    def _some_sums(
        self, x: Activations, weights: torch.Tensor, ids: torch.Tensor, communicator: Communicator
    ) -> torch.Tensor:
        """[M, hidden / world]: the sums of this rank's rows of down, over the hidden values of all ranks."""
        gate_up, scale = self.gate_up, self.gate_up_scale
        if self.quantizes_rows:
            hidden = moe_hidden_w8a8(*quantized(x), ids, gate_up, scale, self.is_float32)
            values, factors = communicator.gather_quantized(*hidden)
            down = (self.down, self.down_scale)
            return moe_sums_w8a8(values, factors, weights, ids, *down, self.is_float32)
        whole = communicator.gather_columns(moe_hidden(plain(x), ids, gate_up, scale))
        return moe_sums(whole, weights, ids, self.prompt_down, self.prompt_down_scale)
