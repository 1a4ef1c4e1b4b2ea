"""The specification of `moe_experts_w4a16`: experts in four-bit codes, rows as they are."""

from __future__ import annotations

from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_mtp.ops.checks import fail
from compiled_mtp.ops.int4 import GROUPS, UNIT, dequantize
from compiled_mtp.ops.k_splits import count_k_splits
from compiled_mtp.ops.numerics import silu
from compiled_mtp.ops.registry import operator
from compiled_mtp.ops.signature import CONTIGUOUS, F32, I32, Remedy

BF16, I16 = torch.bfloat16, torch.int16
_STACK = Remedy("stack what ops.int4.pack gives for each expert")
_GROUPS = Remedy("stack what ops.int4.pack_groups gives for each expert")
_SHARED = Remedy("pass the shared expert's weights in bfloat16, or None if the stacks hold it")
Ids = Annotated[Tensor, "M slots", I32, CONTIGUOUS, Remedy("pass the ids of moe_router")]
Weights = Annotated[Tensor, "M slots", F32, CONTIGUOUS, Remedy("pass the weights of moe_router")]
Scales = (torch.float16, BF16)


def _fits(name: str, columns: int, groups: int) -> None:
    if columns == 0 or columns % UNIT:
        raise fail(name, f"have a multiple of {UNIT} columns", columns, "multiply the experts out")
    if groups == 0 or columns % groups or columns // groups not in GROUPS:
        rule = f"have groups of {', '.join(map(str, GROUPS))} columns of {columns}"
        raise fail(f"{name}_scale", rule, f"{groups} groups", _GROUPS.text)


def _experts_fit(
    down: Tensor,
    shared_gate_up: Tensor | None,
    shared_down: Tensor | None,
    prefill: bool,
    whole_width: int,
    H: int,
    J: int,
    G: int,
    D: int,
) -> None:
    _fits("gate_up", H, G)
    _fits("down", 4 * J, D)
    if (shared_gate_up is None) != (shared_down is None):
        raise fail("shared_down", "be given with shared_gate_up", shared_down, "pass both or neither")
    if whole_width > 4 * J and prefill and down.is_cuda:
        remedy = "its experts are whole there: pass them so"
        raise fail("whole_width", "be 0 for a prompt's rows on a GPU", whole_width, remedy)
    if whole_width and 4 * J * count_k_splits(whole_width) % whole_width:
        rule = f"be the width of experts of which {4 * J} are whole K splits"
        raise fail("whole_width", rule, whole_width, "pass the width of the experts that were cut, or 0")


def _sum(x: Tensor, whole_width: int, J: int) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.float32 if whole_width > 4 * J else x.dtype)


@operator(check=_experts_fit, fake=_sum)
def moe_experts_w4a16(
    x: Annotated[Tensor, "M H", BF16],
    weights: Weights,
    ids: Ids,
    gate_up: Annotated[Tensor, "E 8*J H//4", I16, CONTIGUOUS, _STACK],
    down: Annotated[Tensor, "E H J", I16, CONTIGUOUS, _STACK],
    gate_up_scale: Annotated[Tensor, "E G 8*J 2", Scales, CONTIGUOUS, _GROUPS],
    down_scale: Annotated[Tensor, "E D H 2", Scales, CONTIGUOUS, _GROUPS],
    shared_gate_up: Annotated[Tensor, "8*J H", BF16, CONTIGUOUS, _SHARED] | None = None,
    shared_down: Annotated[Tensor, "H 4*J", BF16, CONTIGUOUS, _SHARED] | None = None,
    prefill: bool = False,
    whole_width: int = 0,
) -> Annotated[Tensor, "M H", (BF16, F32)]:
    """`moe_experts` with four-bit weights, each product as `linear_w4a16` has it.

    x [M, H] bfloat16 (row stride free), weights, ids, prefill and whole_width as there. gate_up: words
    [E, 2*MI, H / 4] int16 (gate rows first) and gate_up_scale: groups [E, H / group, 2*MI, 2], down: words
    [E, H, MI / 4] and down_scale: groups [E, MI / group, H, 2], as ops.int4 packs them expert by expert.
    shared_gate_up [2*MI, H] and shared_down [H, MI]: the shared expert in bfloat16, whose id is then E; if
    they are None, the stacks hold it last. Returns [M, H] bfloat16, summed in float32 with one rounding, or a
    part of each sum in float32 for a whole_width beyond MI; the hidden activation is rounded to bfloat16. The
    bits of a row depend on that row, the weights and `prefill` alone.
    """

    def values(stack: Tensor, scale: Tensor, shared: Tensor | None, expert: int) -> Tensor:
        if shared is not None and expert == len(stack):
            return shared.float()
        return dequantize(stack[expert], scale[expert])

    total = torch.zeros_like(x, dtype=torch.float32)
    for row, experts in enumerate(ids.tolist()):
        for slot, expert in enumerate(experts):
            both = values(gate_up, gate_up_scale, shared_gate_up, expert)
            gate, up = F.linear(x[row].float(), both).chunk(2)
            hidden = (silu(gate) * up).to(x.dtype)
            result = F.linear(hidden.float(), values(down, down_scale, shared_down, expert))
            total[row] += weights[row, slot] * result
    return total if whole_width > 4 * down.shape[2] else total.to(x.dtype)
