"""`moe_experts` on a CPU: each expert's rows gathered and multiplied together."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from compiled_mtp.ops.fp8 import dequantize
from compiled_mtp.ops.numerics import silu

# On a CPU a float32 matmul gives a row the same bits for every row count that is a multiple of 4 (measured).
_ROW_UNIT = 8


def _dequantize(weight: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    return weight if scale is None else dequantize(weight, scale).to(dtype)


def moe_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_scale: torch.Tensor | None,
    down_scale: torch.Tensor | None,
    prefill: bool,
) -> torch.Tensor:
    """Every expert's rows are padded with zeros to a multiple of 8: no row's bits depend on its company."""
    rows, slots = ids.shape
    expert_of_pair = ids.flatten().long()
    pairs = expert_of_pair.sort(stable=True).indices
    counts = torch.bincount(expert_of_pair, minlength=gate_up.shape[0]).tolist()
    outputs = torch.empty(rows * slots, down.shape[1], dtype=torch.float32, device=x.device)
    start = 0
    for expert, count in enumerate(counts):
        if count == 0:
            continue
        chosen = pairs[start : start + count]
        start += count
        inputs = x.new_zeros(-(-count // _ROW_UNIT) * _ROW_UNIT, x.shape[1])
        inputs[:count] = x[chosen // slots]
        scale = None if gate_up_scale is None else gate_up_scale[expert]
        both = F.linear(inputs, _dequantize(gate_up[expert], scale, x.dtype)).to(torch.float32)
        gate, up = both.chunk(2, dim=1)
        hidden = (silu(gate) * up).to(x.dtype)
        scale = None if down_scale is None else down_scale[expert]
        result = F.linear(hidden, _dequantize(down[expert], scale, x.dtype))
        outputs[chosen] = result[:count].to(torch.float32)
    by_slot = outputs.view(rows, slots, -1)
    total = weights[:, :1] * by_slot[:, 0]
    for slot in range(1, slots):
        total = total + weights[:, slot : slot + 1] * by_slot[:, slot]
    return total.to(x.dtype)
