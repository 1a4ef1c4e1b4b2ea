"""Mixture of experts: one router with the shared expert's gate as its last row, one stack with it as expert
E."""

from __future__ import annotations

import torch
from torch import nn

from compiled_mtp.model_config import ModelConfig
from compiled_mtp.ops.fp8 import scale_shape
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
    """sum over the top-k experts of p_e down_e(silu(gate_e x) * up_e x), plus the gated shared expert.

    The stacks `gate_up` [E + 1, 2 * width, hidden] and `down` [E + 1, hidden, width] are both FP8, with
    float32 scales a block of an expert each, or neither is and the scales are None.
    """

    gate_up: nn.Parameter
    down: nn.Parameter
    gate_up_scale: nn.Parameter | None
    down_scale: nn.Parameter | None

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        fp8: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__()
        experts, width, hidden = config.num_experts + 1, config.moe_intermediate_size, config.hidden_size
        self.top_k = config.num_experts_per_tok
        self.renormalize = config.norm_topk_prob
        self.router = Router(config, dtype, device)
        is_fp8 = "gate_up" in fp8
        stack_dtype = torch.float8_e4m3fn if is_fp8 else dtype
        for name, shape in (("gate_up", (experts, 2 * width, hidden)), ("down", (experts, hidden, width))):
            stack = torch.empty(shape, dtype=stack_dtype, device=device)
            self.register_parameter(name, nn.Parameter(stack, requires_grad=False))
            scale = torch.empty(scale_shape(shape), dtype=torch.float32, device=device) if is_fp8 else None
            self.register_parameter(
                f"{name}_scale", None if scale is None else nn.Parameter(scale, requires_grad=False)
            )

    def forward(self, x: torch.Tensor, is_prefill: bool) -> torch.Tensor:
        weights, ids = moe_router(self.router(x, is_prefill), self.top_k, self.renormalize)
        return moe_experts(x, weights, ids, self.gate_up, self.down, self.gate_up_scale, self.down_scale)
