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
    moe_experts_blocks,
    moe_experts_w4a16,
    moe_experts_w8a8,
    moe_hidden,
    moe_hidden_w4a16,
    moe_hidden_w8a8,
    moe_sums,
    moe_sums_w4a16,
    moe_sums_w8a8,
)
from compiled_mtp.ops.moe_router import moe_router, recorded_router


class Router(nn.Module):
    """Scores the routed experts by rows 0..E-1 and gates the shared one by row E; weight [E + 1, hidden]."""

    def __init__(self, make: ParameterFactory, config: ModelConfig) -> None:
        super().__init__()
        self.weight = make.empty(config.num_experts + 1, config.hidden_size)

    def forward(self, x: torch.Tensor, rows: Rows) -> torch.Tensor:
        return linear(x, self.weight, None, True, isinstance(rows, PrefillRows))


class MoE(nn.Module):
    """sum over the top-k experts of p_e down_e(silu(gate_e x) * up_e x), plus the gated shared expert.

    The stacks `gate_up` [E + 1, 2 * width, hidden] and `down` [E + 1, hidden, width] have one format, apart
    from the groups of four-bit codes and the kinds of scaled codes. If the format has factors,
    `gate_up_scale` and `down_scale` hold the factors of each expert, else they are None. If the stacks are
    codes and the shared expert is stored otherwise, or they are scaled codes, they have E experts, and
    `shared_gate_up` [2 * width, hidden] and `shared_down` [hidden, width] hold it; else these are None.

    record [blocks, block_size * top_k] int16: where `forward` records the experts of its rows; None for no
    record.

    `forward` returns sums [M, hidden]. With several ranks each holds a share of every expert's width in gate
    and up, and some rows of every down: the ranks gather the hidden values, each computes the sums of its
    rows of down, and they gather these.
    """

    gate_up: nn.Parameter
    down: nn.Parameter
    gate_up_scale: nn.Parameter | None
    down_scale: nn.Parameter | None
    shared_gate_up: nn.Parameter | None
    shared_down: nn.Parameter | None
    record: torch.Tensor | None

    def __init__(self, make: ParameterFactory, config: ModelConfig) -> None:
        super().__init__()
        width, hidden = config.moe_intermediate_size, config.hidden_size
        self.top_k = config.num_experts_per_tok
        self.renormalize = config.norm_topk_prob
        self.communicator = make.communicator
        self.router = Router(make.part("router"), config)
        has_shared = make.lists("shared_gate_up")
        experts = config.num_experts + (not has_shared)
        make.add_weight(self, "gate_up", experts, 2 * width, hidden)
        self.register_parameter("shared_gate_up", make.empty(2 * width, hidden) if has_shared else None)
        down = (hidden // config.world, width * config.world)
        self.register_parameter("shared_down", make.empty(*down) if has_shared else None)
        self.quantizes_rows = make.format_of("gate_up").quantizes_rows
        self.has_codes = make.format_of("gate_up").group > 0
        forms = [make.format_of(name) for name in ("gate_up", "down")]
        # The kinds of both stacks if they hold scaled codes, else None.
        self.kinds = (forms[0].parts[0].name, forms[1].parts[0].name) if forms[0].parts else None
        make.add_weight(self, "down", experts, *down)
        self.is_float32 = make.dtype == torch.float32
        self.register_buffer("record", None)

    def forward(self, x: Activations, rows: Rows) -> torch.Tensor:
        logits, how_many = self.router(plain(x), rows), (self.top_k, self.renormalize)
        if self.record is None:
            weights, ids = moe_router(logits, *how_many)
        else:
            weights, ids = recorded_router(logits, *how_many, rows.slot_mapping, self.record)
        stacks, scales = (self.gate_up, self.down), (self.gate_up_scale, self.down_scale)
        is_prefill, communicator = isinstance(rows, PrefillRows), self.communicator
        if communicator is not None:
            sums = self._some_sums(x, weights, ids, is_prefill, communicator)
            return communicator.gather_columns(sums)
        if self.quantizes_rows:
            return moe_experts_w8a8(*quantized(x), weights, ids, *stacks, *scales, self.is_float32)
        x, gate_up, down = plain(x), self.shared_gate_up, self.shared_down
        if self.kinds is not None:
            assert gate_up is not None
            assert down is not None
            return moe_experts_blocks(x, weights, ids, *self.codes, gate_up, down, *self.kinds)
        if self.has_codes:
            return moe_experts_w4a16(x, weights, ids, *self.codes, gate_up, down)
        return moe_experts(x, weights, ids, *stacks, *scales, is_prefill)

    @property
    def codes(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The words and the scales of packed experts: gate|up, down, and the scales of both."""
        gate_up_scale, down_scale = self.gate_up_scale, self.down_scale
        assert gate_up_scale is not None
        assert down_scale is not None
        return self.gate_up, self.down, gate_up_scale, down_scale

    def _some_sums(
        self,
        x: Activations,
        weights: torch.Tensor,
        ids: torch.Tensor,
        is_prefill: bool,
        communicator: Communicator,
    ) -> torch.Tensor:
        """[M, hidden / world]: the sums of this rank's rows of down, over the hidden values of all ranks."""
        gather, scale = communicator.gather_columns, self.gate_up_scale
        if self.quantizes_rows:
            made = moe_hidden_w8a8(*quantized(x), ids, self.gate_up, scale, self.is_float32)
            values, factors = communicator.gather_quantized(*made)
            down = (self.down, self.down_scale)
            return moe_sums_w8a8(values, factors, weights, ids, *down, self.is_float32)
        if self.has_codes:
            gate_up, stack, gate_up_scale, stack_scale = self.codes
            hidden = gather(moe_hidden_w4a16(plain(x), ids, gate_up, gate_up_scale, self.shared_gate_up))
            return moe_sums_w4a16(hidden, weights, ids, stack, stack_scale, self.shared_down)
        hidden = gather(moe_hidden(plain(x), ids, self.gate_up, scale, is_prefill))
        return moe_sums(hidden, weights, ids, self.down, self.down_scale, is_prefill)
