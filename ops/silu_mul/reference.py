"""The specification of `silu_mul`, and what runs on the CPU."""

from __future__ import annotations

import torch

from compiled_mtp.ops.numerics import silu


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (silu(gate) * up).to(gate_up.dtype).contiguous()
