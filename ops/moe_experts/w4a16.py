"""The specifications of experts in four-bit codes: both products, and each of them apart."""

from __future__ import annotations

from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_mtp.ops.checks import fail
from compiled_mtp.ops.int4 import GROUPS, ROWS, UNIT, dequantize
from compiled_mtp.ops.moe_experts.halves import (
    Ids,
    Weights,
    experts_fences,
    fences,
    new_hidden,
    new_sums,
    sorted_pairs,
    sums_fences,
)
from compiled_mtp.ops.numerics import silu
from compiled_mtp.ops.registry import operator
from compiled_mtp.ops.signature import CONTIGUOUS, Remedy

BF16, I16 = torch.bfloat16, torch.int16
_STACK = Remedy("stack what ops.int4.pack gives for each expert")
_GROUPS = Remedy("stack what ops.int4.pack_groups gives for each expert")
_SHARED = Remedy("pass the shared expert's weights in bfloat16, or None if the stacks hold it")
_HIDDEN = Remedy("pass what the first product of these ids gives")
Scales = (torch.float16, BF16)


def _fits(name: str, columns: int, groups: int) -> None:
    if columns == 0 or columns % UNIT:
        raise fail(name, f"have a multiple of {UNIT} columns", columns, "multiply the experts out")
    if groups == 0 or columns % groups or columns // groups not in GROUPS:
        rule = f"have groups of {', '.join(map(str, GROUPS))} columns of {columns}"
        raise fail(f"{name}_scale", rule, f"{groups} groups", _GROUPS.text)


def _experts_fit(
    shared_gate_up: Tensor | None,
    shared_down: Tensor | None,
    H: int,
    J: int,
    G: int,
    D: int,
) -> None:
    _fits("gate_up", H, G)
    _fits("down", 4 * J, D)
    if (shared_gate_up is None) != (shared_down is None):
        raise fail("shared_down", "be given with shared_gate_up", shared_down, "pass both or neither")


@operator(
    launches=experts_fences("gate_up_codes_kernel", "down_codes_kernel", "down", "down_scale"),
    check=_experts_fit,
    fake=lambda x: x.new_empty(x.shape),
)
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
) -> Annotated[Tensor, "M H", BF16]:
    """`moe_experts` with four-bit weights, each product as `linear_w4a16` has it.

    x [M, H] bfloat16 (row stride free), weights and ids as there. gate_up: words
    [E, 2*MI, H / 4] int16 (gate rows first) and gate_up_scale: groups [E, H / group, 2*MI, 2], down: words
    [E, H, MI / 4] and down_scale: groups [E, MI / group, H, 2], as ops.int4 packs them expert by expert.
    shared_gate_up [2*MI, H] and shared_down [H, MI]: the shared expert in bfloat16, whose id is then E; if
    they are None, the stacks hold it last. Returns [M, H] bfloat16, summed in float32 with one rounding; the
    hidden activation is rounded to bfloat16. The bits of a row depend on that row and the weights alone.
    """

    hidden = _multiply_gate_up(x, ids, gate_up, gate_up_scale, shared_gate_up)
    return _multiply_down(hidden, weights, ids, down, down_scale, shared_down).to(x.dtype)


def _hidden_fits(H: int, both: int, G: int) -> None:
    _fits("gate_up", H, G)
    if both % (2 * UNIT):
        raise fail("gate_up", f"have a multiple of {2 * UNIT} rows", both, "cut experts between units")


def _sums_fit(I: int, N: int, D: int) -> None:  # noqa: E741 - the name in the annotations
    _fits("down", I, D)
    if N % ROWS:
        raise fail("down", f"have a multiple of {ROWS} rows", N, "cut it between its blocks of rows")


@operator(launches=fences("plan_kernel", "gate_up_codes_kernel"), check=_hidden_fits, fake=new_hidden)
def moe_hidden_w4a16(
    x: Annotated[Tensor, "M H", BF16],
    ids: Ids,
    gate_up: Annotated[Tensor, "E both H//4", I16, CONTIGUOUS, _STACK],
    gate_up_scale: Annotated[Tensor, "E G both 2", Scales, CONTIGUOUS, _GROUPS],
    shared_gate_up: Annotated[Tensor, "both H", BF16, CONTIGUOUS, _SHARED] | None = None,
) -> Annotated[Tensor, "_ I", BF16]:
    """silu(gate_e x) * up_e x: the first product of `moe_experts_w4a16`, to the bit.

    Arguments as there; gate_up may hold the gate's and the up's rows of some of the hidden columns, in whole
    units of 128. Returns [M * slots, I] bfloat16: a row for each pair, sorted as by `moe_hidden`.
    """
    pairs = sorted_pairs(ids)
    return _multiply_gate_up(x, ids, gate_up, gate_up_scale, shared_gate_up).flatten(0, 1)[pairs]


@operator(
    launches=sums_fences("down_codes_kernel"),
    check=_sums_fit,
    fake=new_sums,
)
def moe_sums_w4a16(
    hidden: Annotated[Tensor, "pairs I", BF16, CONTIGUOUS, _HIDDEN],
    weights: Weights,
    ids: Ids,
    down: Annotated[Tensor, "E N I//4", I16, CONTIGUOUS, _STACK],
    down_scale: Annotated[Tensor, "E D N 2", Scales, CONTIGUOUS, _GROUPS],
    shared_down: Annotated[Tensor, "N I", BF16, CONTIGUOUS, _SHARED] | None = None,
) -> Annotated[Tensor, "M N", BF16]:
    """The weighted sums of hidden values: the second product of `moe_experts_w4a16`, to the bit.

    hidden [M * slots, I]: what `moe_hidden_w4a16` gives for these ids, all of its columns. down may hold some
    rows of every expert, in whole blocks of 16. Returns [M, N] bfloat16.
    """
    places = sorted_pairs(ids).argsort().view(ids.shape)
    return _multiply_down(hidden[places], weights, ids, down, down_scale, shared_down).to(hidden.dtype)


def _values(stack: Tensor, scale: Tensor, shared: Tensor | None, expert: int) -> Tensor:
    if shared is not None and expert == len(stack):
        return shared.float()
    return dequantize(stack[expert], scale[expert])


def _multiply_gate_up(
    x: Tensor, ids: Tensor, gate_up: Tensor, scale: Tensor, shared: Tensor | None
) -> Tensor:
    """The hidden values [M, slots, I] of each row's experts, rounded to x's dtype."""
    hidden = x.new_empty((*ids.shape, gate_up.shape[1] // 2))
    for row, experts in enumerate(ids.tolist()):
        for slot, expert in enumerate(experts):
            both = F.linear(x[row].float(), _values(gate_up, scale, shared, expert))
            gate, up = both.chunk(2)
            hidden[row, slot] = silu(gate) * up
    return hidden


def _multiply_down(
    hidden: Tensor, weights: Tensor, ids: Tensor, down: Tensor, scale: Tensor, shared: Tensor | None
) -> Tensor:
    """The weighted sums [M, N] float32 of hidden values [M, slots, I]."""
    total = hidden.new_zeros((len(ids), down.shape[1]), dtype=torch.float32)
    for row, experts in enumerate(ids.tolist()):
        for slot, expert in enumerate(experts):
            result = F.linear(hidden[row, slot].float(), _values(down, scale, shared, expert))
            total[row] += weights[row, slot] * result
    return total
