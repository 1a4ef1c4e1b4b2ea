"""The specification of `moe_experts`."""

from __future__ import annotations

from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_mtp.ops.checks import fail, wrong_dtype
from compiled_mtp.ops.fp8 import FP8_BLOCK, dequantize, quantize, quantized_values
from compiled_mtp.ops.moe_experts.halves import experts_fences
from compiled_mtp.ops.numerics import silu
from compiled_mtp.ops.registry import operator
from compiled_mtp.ops.signature import ACTIVATION, CONTIGUOUS, F32, FP8, I32, Remedy

_STACK = Remedy("stack the experts and put the shared expert last")
_SCALE = Remedy("pass one scale for each 128 x 128 block")


def _experts_fit(
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


@operator(
    launches=experts_fences("gate_up_kernel", "down_kernel"),
    check=_experts_fit,
    fake=lambda x: x.new_empty(x.shape),
    has_cpu_route=True,
)
def moe_experts(
    x: Annotated[Tensor, "M H", ACTIVATION],
    weights: Annotated[Tensor, "M slots", F32, CONTIGUOUS, Remedy("pass the weights of moe_router")],
    ids: Annotated[Tensor, "M slots", I32, CONTIGUOUS, Remedy("pass the ids of moe_router")],
    gate_up: Annotated[Tensor, "E 2*I H", (*ACTIVATION, FP8), CONTIGUOUS, _STACK],
    down: Annotated[Tensor, "E H I", (*ACTIVATION, FP8), CONTIGUOUS, _STACK],
    gate_up_scale: Annotated[Tensor, "E (2*I+127)//128 (H+127)//128", F32, CONTIGUOUS, _SCALE] | None = None,
    down_scale: Annotated[Tensor, "E (H+127)//128 (I+127)//128", F32, CONTIGUOUS, _SCALE] | None = None,
    prefill: bool = False,
) -> Annotated[Tensor, "M H", ACTIVATION]:
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


def _groups_fit(
    x: Tensor, gate_up: Tensor, down: Tensor, gate_up_scale: Tensor | None, down_scale: Tensor | None
) -> None:
    for name, columns in (("x", x.shape[1]), ("down", down.shape[2])):
        if columns == 0 or columns % FP8_BLOCK:
            raise fail(name, f"have a multiple of {FP8_BLOCK} columns", columns, "use moe_experts")
    stacks = (("gate_up", gate_up, gate_up_scale), ("down", down, down_scale))
    for name, weight, scale in stacks:
        if weight.dtype == FP8 and scale is None:
            raise fail(
                f"{name}_scale", "be given for FP8 weights", None, "pass the checkpoint's block scales"
            )
        if weight.dtype != FP8 and scale is not None:
            raise fail(f"{name}_scale", "be None unless the weights are FP8", weight.dtype, "drop it")
        if weight.dtype != FP8 and weight.is_cuda:
            raise fail(name, "have dtype float8_e4m3fn on a GPU", weight.dtype, "keep it in FP8")


def _result(x: Tensor, out_float32: bool) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.float32 if out_float32 else torch.bfloat16)


@operator(
    launches=experts_fences("gate_up_w8a8_kernel", "down_w8a8_kernel"),
    check=_groups_fit,
    fake=_result,
    has_cpu_route=True,
)
def moe_experts_w8a8(
    x: Annotated[Tensor, "M H", FP8, Remedy("pass what quantize_rows gives")],
    x_scale: Annotated[Tensor, "M H//128", F32, Remedy("pass quantize_rows' factors")],
    weights: Annotated[Tensor, "M slots", F32, CONTIGUOUS, Remedy("pass the weights of moe_router")],
    ids: Annotated[Tensor, "M slots", I32, CONTIGUOUS, Remedy("pass the ids of moe_router")],
    gate_up: Annotated[Tensor, "E 2*I H", (FP8, *ACTIVATION), CONTIGUOUS, _STACK],
    down: Annotated[Tensor, "E H I", (FP8, *ACTIVATION), CONTIGUOUS, _STACK],
    gate_up_scale: Annotated[Tensor, "E (2*I+127)//128 H//128", F32, CONTIGUOUS, _SCALE] | None,
    down_scale: Annotated[Tensor, "E H//128 I//128", F32, CONTIGUOUS, _SCALE] | None,
    out_float32: bool = False,
) -> Annotated[Tensor, "M H", (torch.bfloat16, torch.float32)]:
    """`moe_experts` of quantised rows, with FP8 weights, the hidden activations quantised too.

    x [M, H] and x_scale [M, H / 128]: what `quantize_rows` gives, rows at any stride; the rest as for
    `moe_experts`, on a CPU also weights that were multiplied out, without factors. H and the experts' width
    are multiples of 128. The hidden activation is rounded to bfloat16, not with `out_float32`, and quantised
    in groups of 128. Returns [M, H] bfloat16, or float32 when `out_float32`, summed in float32. The bits of a
    row depend on that row and the weights alone.
    """

    def multiply(row: Tensor, stack: Tensor, scale: Tensor | None, expert: int) -> Tensor:
        weight = stack[expert].float() if scale is None else dequantize(stack[expert], scale[expert])
        return F.linear(row, weight)

    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    values = quantized_values(x, x_scale)
    for row, experts in enumerate(ids.tolist()):
        for slot, expert in enumerate(experts):
            gate, up = multiply(values[row], gate_up, gate_up_scale, expert).chunk(2)
            hidden = silu(gate) * up
            hidden = hidden if out_float32 else hidden.bfloat16()
            hidden = quantized_values(*quantize(hidden[None]))[0]
            total[row] += weights[row, slot] * multiply(hidden, down, down_scale, expert)
    return total if out_float32 else total.bfloat16()
