"""The specification of `moe_experts`."""

from __future__ import annotations

from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_mtp.ops.checks import fail, wrong_dtype
from compiled_mtp.ops.fp8 import dequantize
from compiled_mtp.ops.numerics import silu
from compiled_mtp.ops.registry import operator
from compiled_mtp.ops.signature import ACTIVATION, CONTIGUOUS, F32, FP8, I32, Like, Remedy

_STACK = Remedy("stack the experts and put the shared expert last")
_SCALE = Remedy("pass one scale for each 128 x 128 block")


def _scales_fit(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_scale: Tensor | None,
    down_scale: Tensor | None,
) -> None:
    if (gate_up_scale is None) != (down_scale is None):
        raise fail("down_scale", "be given with gate_up_scale", down_scale, "pass both or neither")
    dtype = x.dtype if gate_up_scale is None else FP8
    for name, weight in (("gate_up", gate_up), ("down", down)):
        if weight.dtype != dtype:
            raise wrong_dtype(name, weight, (dtype,))


@operator(check=_scales_fit, has_cpu_route=True)
def moe_experts(
    x: Annotated[Tensor, "M H", ACTIVATION],
    weights: Annotated[Tensor, "M slots", F32, CONTIGUOUS, Remedy("pass the weights of moe_router")],
    ids: Annotated[Tensor, "M slots", I32, CONTIGUOUS, Remedy("pass the ids of moe_router")],
    gate_up: Annotated[Tensor, "E 2*I H", (*ACTIVATION, FP8), CONTIGUOUS, _STACK],
    down: Annotated[Tensor, "E H I", (*ACTIVATION, FP8), CONTIGUOUS, _STACK],
    gate_up_scale: Annotated[Tensor, "E (2*I+127)//128 (H+127)//128", F32, CONTIGUOUS, _SCALE] | None = None,
    down_scale: Annotated[Tensor, "E (H+127)//128 (I+127)//128", F32, CONTIGUOUS, _SCALE] | None = None,
    prefill: bool = False,
) -> Annotated[Tensor, "M H", Like("x")]:
    """Sum over a row's slots, in slot order, of weight * down_e(silu(gate_e x) * up_e x).

    `x` [M, H] (row stride free); `weights` [M, k+1] and `ids` [M, k+1] as `moe_router` gives them: ids are
    distinct within a row, the last is E, the shared expert; `gate_up` [E+1, 2*MI, H] (gate rows first) and
    `down` [E+1, H, MI] in x's dtype, or in float8_e4m3fn with one scale for each 128 x 128 block:
    `gate_up_scale` [E+1, ceil(2*MI/128), ceil(H/128)], `down_scale` [E+1, ceil(H/128), ceil(MI/128)].
    Returns [M, H] in x's dtype, summed in float32 with one rounding; the hidden activation is rounded to x's
    dtype. The bits of a row depend on that row, the weights and `prefill` alone: with it the rows are a
    prompt's, for which a GPU has tiles that are faster with many rows.
    """

    def multiply(row: Tensor, stack: Tensor, scale: Tensor | None, expert: int) -> Tensor:
        weight = stack[expert] if scale is None else dequantize(stack[expert], scale[expert]).to(x.dtype)
        return F.linear(row, weight).float()

    total = torch.zeros_like(x, dtype=torch.float32)
    for row, experts in enumerate(ids.tolist()):
        for slot, expert in enumerate(experts):
            gate, up = multiply(x[row], gate_up, gate_up_scale, expert).chunk(2)
            hidden = (silu(gate) * up).to(x.dtype)
            total[row] += weights[row, slot] * multiply(hidden, down, down_scale, expert)
    return total.to(x.dtype)
