"""The specifications of the experts' two products apart, with rows as they are and quantised: between them
ranks gather the hidden values."""

from __future__ import annotations

from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_mtp.ops.checks import fail, wrong_dtype
from compiled_mtp.ops.fp8 import FP8_BLOCK, dequantize, quantize, quantized_values
from compiled_mtp.ops.numerics import silu
from compiled_mtp.ops.registry import Launch, operator
from compiled_mtp.ops.signature import ACTIVATION, CONTIGUOUS, F32, FP8, I32, Remedy

_STACK = Remedy("stack the experts and put the shared expert last")
_SCALE = Remedy("pass one scale for each 128 x 128 block")
_HIDDEN = Remedy("pass what the first product of these ids gives")
Ids = Annotated[Tensor, "M slots", I32, CONTIGUOUS, Remedy("pass the ids of moe_router")]
Weights = Annotated[Tensor, "M slots", F32, CONTIGUOUS, Remedy("pass the weights of moe_router")]
GateUp = Annotated[Tensor, "E both H", (*ACTIVATION, FP8), CONTIGUOUS, _STACK]
GateUpScale = Annotated[Tensor, "E (both+127)//128 (H+127)//128", F32, CONTIGUOUS, _SCALE]
Down = Annotated[Tensor, "E N I", (*ACTIVATION, FP8), CONTIGUOUS, _STACK]
DownScale = Annotated[Tensor, "E (N+127)//128 (I+127)//128", F32, CONTIGUOUS, _SCALE]


def fences(*kernels: str) -> tuple[Launch, ...]:
    """Launches that touch nothing early: experts are known only when the kernel before has ended."""
    return tuple(Launch(kernel, is_fence=True) for kernel in kernels)


def experts_fences(gate_up: str, down: str, *early: str) -> tuple[Launch, ...]:
    """Launches of whole experts: down's programs find their pairs while those of gate and up end, and read
    `early`."""
    own = Launch(down, reads_early=("ids", *early), reads_own=("tiles", "pairs"), is_fence=True)
    return (*fences("plan_kernel", gate_up), own, *fences("sum_slots_kernel"))


def sums_fences(down: str) -> tuple[Launch, ...]:
    """Launches of down alone, which follows `plan`."""
    own = Launch(down, is_fence=True, waits_first=True)
    return (*fences("plan_kernel"), own, *fences("sum_slots_kernel"))


def _fits(name: str, weight: Tensor, scale: Tensor | None, dtype: torch.dtype) -> None:
    wanted = dtype if scale is None else FP8
    if weight.dtype != wanted:
        raise wrong_dtype(name, weight, (wanted,))


def _groups_fit(name: str, columns: int, stack: str, weight: Tensor, scale: Tensor | None) -> None:
    if columns == 0 or columns % FP8_BLOCK:
        raise fail(name, f"have a multiple of {FP8_BLOCK} columns", columns, "pass rows as they are")
    if (weight.dtype == FP8) != (scale is not None):
        rule = "be given for FP8 weights, and for no others"
        raise fail(f"{stack}_scale", rule, weight.dtype, "pass the checkpoint's block scales, or None")
    if weight.dtype != FP8 and weight.is_cuda:
        raise fail(stack, "have dtype float8_e4m3fn on a GPU", weight.dtype, "keep it in FP8")


def _hidden_fits(x: Tensor, gate_up: Tensor, gate_up_scale: Tensor | None, both: int) -> None:
    if both % 2:
        raise fail("gate_up", "have an even number of rows", both, "pass gate | up")
    _fits("gate_up", gate_up, gate_up_scale, x.dtype)


def _sums_fit(hidden: Tensor, down: Tensor, down_scale: Tensor | None) -> None:
    _fits("down", down, down_scale, hidden.dtype)


def _hidden_groups_fit(x: Tensor, gate_up: Tensor, gate_up_scale: Tensor | None, both: int) -> None:
    _groups_fit("x", x.shape[1], "gate_up", gate_up, gate_up_scale)
    if both % (2 * FP8_BLOCK):
        rule = f"have a multiple of {2 * FP8_BLOCK} rows"
        raise fail("gate_up", rule, both, "cut experts between groups")


def _sums_groups_fit(hidden: Tensor, down: Tensor, down_scale: Tensor | None, N: int) -> None:
    _groups_fit("hidden", hidden.shape[1], "down", down, down_scale)
    if N % FP8_BLOCK and down.is_cuda:
        raise fail("down", f"have a multiple of {FP8_BLOCK} rows", N, "cut it between its blocks")


def new_hidden(x: Tensor, ids: Tensor, gate_up: Tensor) -> Tensor:
    """Allocate hidden values [M * slots, I]."""
    return x.new_empty((ids.numel(), gate_up.shape[1] // 2))


def _hidden_groups(x: Tensor, ids: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    pairs, inner = ids.numel(), gate_up.shape[1] // 2
    return x.new_empty((pairs, inner)), x.new_empty((pairs, inner // FP8_BLOCK), dtype=F32)


def new_sums(hidden: Tensor, ids: Tensor, down: Tensor) -> Tensor:
    """Allocate weighted sums [M, N]."""
    return hidden.new_empty((ids.shape[0], down.shape[1]))


def _sums_of_groups(hidden: Tensor, ids: Tensor, down: Tensor, out_float32: bool) -> Tensor:
    dtype = torch.float32 if out_float32 else torch.bfloat16
    return hidden.new_empty((ids.shape[0], down.shape[1]), dtype=dtype)


def sorted_pairs(ids: Tensor) -> Tensor:
    """[M * slots]: the numbers row * slots + slot, by expert, then ascending."""
    return ids.flatten().long().sort(stable=True).indices


def _multiply(row: Tensor, stack: Tensor, scale: Tensor | None, expert: int, dtype: torch.dtype) -> Tensor:
    weight = stack[expert] if scale is None else dequantize(stack[expert], scale[expert])
    return F.linear(row, weight.to(dtype)).float()


def _multiply_gate_up(x: Tensor, ids: Tensor, gate_up: Tensor, scale: Tensor | None) -> Tensor:
    rows, experts = [], ids.flatten().tolist()
    for pair in sorted_pairs(ids).tolist():
        both = _multiply(x[pair // ids.shape[1]], gate_up, scale, experts[pair], x.dtype)
        gate, up = both.chunk(2)
        rows.append(silu(gate) * up)
    return torch.stack(rows)


def _multiply_down(
    hidden: Tensor, weights: Tensor, ids: Tensor, down: Tensor, scale: Tensor | None
) -> Tensor:
    place = sorted_pairs(ids).argsort().view(ids.shape).tolist()
    total = torch.zeros((ids.shape[0], down.shape[1]), dtype=torch.float32, device=hidden.device)
    for row, experts in enumerate(ids.tolist()):
        for slot, expert in enumerate(experts):
            result = _multiply(hidden[place[row][slot]], down, scale, expert, hidden.dtype)
            total[row] += weights[row, slot] * result
    return total


@operator(
    launches=fences("plan_kernel", "gate_up_kernel"),
    check=_hidden_fits,
    fake=new_hidden,
    has_cpu_route=True,
)
def moe_hidden(
    x: Annotated[Tensor, "M H", ACTIVATION],
    ids: Ids,
    gate_up: GateUp,
    gate_up_scale: GateUpScale | None = None,
    prefill: bool = False,
) -> Annotated[Tensor, "_ I", ACTIVATION]:
    """silu(gate_e x) * up_e x: the first half of `moe_experts`, to the bit.

    `x` [M, H] (row stride free), `ids` [M, slots], `gate_up` [E, 2*I, H], `gate_up_scale` and `prefill` as
    there; gate_up may hold the gate's and the up's rows of some of the hidden columns. Returns [M * slots, I]
    in x's dtype: a row for each pair (row, slot), by its expert, those of one in the order of row and slot.
    """
    return _multiply_gate_up(x, ids, gate_up, gate_up_scale).to(x.dtype)


@operator(
    launches=sums_fences("down_kernel"),
    check=_sums_fit,
    fake=new_sums,
    has_cpu_route=True,
)
def moe_sums(
    hidden: Annotated[Tensor, "_ I", ACTIVATION, CONTIGUOUS, _HIDDEN],
    weights: Weights,
    ids: Ids,
    down: Down,
    down_scale: DownScale | None = None,
    prefill: bool = False,
) -> Annotated[Tensor, "M N", ACTIVATION]:
    """Sum over a row's slots, in slot order, of weight * down_e hidden: the second half, to the bit.

    `hidden` [M * slots, I]: what `moe_hidden` gives, all of its columns; `weights`, `ids` [M, slots] and
    `prefill` as for `moe_experts`; `down` [E, N, I] and `down_scale`: some of down's rows, in whole blocks
    where it has factors. Returns [M, N] in hidden's dtype, those columns of the result.
    """
    return _multiply_down(hidden, weights, ids, down, down_scale).to(hidden.dtype)


@operator(
    launches=fences("plan_kernel", "gate_up_w8a8_kernel"),
    check=_hidden_groups_fit,
    fake=_hidden_groups,
    has_cpu_route=True,
)
def moe_hidden_w8a8(
    x: Annotated[Tensor, "M H", FP8, Remedy("pass what quantize_rows gives")],
    x_scale: Annotated[Tensor, "M H//128", F32, Remedy("pass quantize_rows' factors")],
    ids: Ids,
    gate_up: GateUp,
    gate_up_scale: GateUpScale | None,
    out_float32: bool = False,
) -> tuple[Annotated[Tensor, "_ I", FP8], Annotated[Tensor, "_ I//128", F32]]:
    """`moe_hidden` of quantised rows, its result quantised in groups of 128: as `moe_experts_w8a8` has it.

    Arguments as there; I in whole groups. Returns e4m3 values [M * slots, I], factors [M * slots, I / 128].
    """
    hidden = _multiply_gate_up(quantized_values(x, x_scale), ids, gate_up, gate_up_scale)
    return quantize(hidden if out_float32 else hidden.bfloat16())


@operator(
    launches=sums_fences("down_w8a8_kernel"),
    check=_sums_groups_fit,
    fake=_sums_of_groups,
    has_cpu_route=True,
)
def moe_sums_w8a8(
    hidden: Annotated[Tensor, "pairs I", FP8, CONTIGUOUS, _HIDDEN],
    hidden_scale: Annotated[Tensor, "pairs I//128", F32, CONTIGUOUS, _HIDDEN],
    weights: Weights,
    ids: Ids,
    down: Down,
    down_scale: DownScale | None,
    out_float32: bool = False,
) -> Annotated[Tensor, "M N", (torch.bfloat16, torch.float32)]:
    """`moe_sums` of quantised hidden values: the second half of `moe_experts_w8a8`, to the bit.

    hidden [M * slots, I] and hidden_scale [M * slots, I / 128]: what `moe_hidden_w8a8` gives, all of its
    columns. Returns [M, N] bfloat16, or float32 when `out_float32`.
    """
    total = _multiply_down(quantized_values(hidden, hidden_scale), weights, ids, down, down_scale)
    return total if out_float32 else total.bfloat16()
