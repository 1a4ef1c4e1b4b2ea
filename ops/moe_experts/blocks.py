"""The specification of experts in scaled codes."""

from __future__ import annotations

from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_mtp.ops.blocks import KINDS, products
from compiled_mtp.ops.coded_weight import check_kind
from compiled_mtp.ops.moe_experts.halves import Ids, Weights, experts_fences
from compiled_mtp.ops.numerics import silu
from compiled_mtp.ops.registry import operator
from compiled_mtp.ops.signature import CONTIGUOUS, Remedy

BF16, I16 = torch.bfloat16, torch.int16
_STACK = Remedy("stack what ops.blocks.pack gives for each expert")
_SCALES = Remedy("stack what ops.blocks.pack_scales gives for each expert")
_SHARED = Remedy("pass the shared expert's weights in bfloat16")


def _fits(name: str, kind: str, rows: int, columns: int, words: int, units: int, fields: int) -> None:
    names, remedies = (f"{name}_kind", name, f"{name}_scale"), (_STACK.text, _SCALES.text)
    check_kind(names, kind, (rows, columns, words), (units, fields), remedies)


def _experts_fit(
    gate_up_kind: str,
    down_kind: str,
    H: int,
    J: int,
    W: int,
    V: int,
    G: int,
    D: int,
    S: int,
    T: int,
) -> None:
    _fits("gate_up", gate_up_kind, 2 * J, H, W, G, S)
    _fits("down", down_kind, H, J, V, D, T)


@operator(
    launches=experts_fences("gate_up_codes_kernel", "down_codes_kernel", "down", "down_scale"),
    check=_experts_fit,
    fake=lambda x: x.new_empty(x.shape),
)
def moe_experts_blocks(
    x: Annotated[Tensor, "M H", BF16],
    weights: Weights,
    ids: Ids,
    gate_up: Annotated[Tensor, "E 2*J W", I16, CONTIGUOUS, _STACK],
    down: Annotated[Tensor, "E H V", I16, CONTIGUOUS, _STACK],
    gate_up_scale: Annotated[Tensor, "E G 2*J S", I16, CONTIGUOUS, _SCALES],
    down_scale: Annotated[Tensor, "E D H T", I16, CONTIGUOUS, _SCALES],
    shared_gate_up: Annotated[Tensor, "2*J H", BF16, CONTIGUOUS, _SHARED],
    shared_down: Annotated[Tensor, "H J", BF16, CONTIGUOUS, _SHARED],
    gate_up_kind: str,
    down_kind: str,
) -> Annotated[Tensor, "M H", BF16]:
    """sum over slots of weights * down_e(silu(gate_e x) * up_e x), with routed experts in scaled codes.

    x [M, H], rows at any stride; weights, ids [M, slots]: of moe_router, where id E is the shared expert,
    whose weights are plain. gate_up, down and their scales: what ops.blocks packs for each of E experts, of
    the kinds gate_up_kind and down_kind. Returns [M, H] bfloat16. The bits of a row depend on that row, its
    experts and their weights alone, for every M.

    A value is one float32 number, rounded once to bfloat16, or a scale multiplies the sum of its columns, as
    in linear_blocks; a factor per row (NVFP4) multiplies its sum. Hidden values are rounded to bfloat16, and
    sums over slots are in float32, in the slots' order.
    """
    total = torch.zeros(x.shape, dtype=torch.float32)
    for row, experts in enumerate(ids.tolist()):
        for slot, expert in enumerate(experts):
            both = _multiply(x[row].float(), gate_up, gate_up_scale, gate_up_kind, shared_gate_up, expert)
            gate, up = both.chunk(2)
            hidden = (silu(gate) * up).bfloat16().float()
            found = _multiply(hidden, down, down_scale, down_kind, shared_down, expert)
            total[row] += weights[row, slot] * found
    return total.bfloat16()


def _multiply(x: Tensor, stack: Tensor, scales: Tensor, kind: str, shared: Tensor, expert: int) -> Tensor:
    if expert == len(stack):
        return F.linear(x, shared.float())
    found, factor = products(stack[expert], scales[expert], KINDS[kind])
    y = F.linear(x, found.bfloat16().float())
    return y if factor is None else y * factor
