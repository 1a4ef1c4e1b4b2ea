"""`moe_experts` on a CPU: each expert's rows gathered and multiplied together."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from compiled_mtp.ops.cpu_product import bfloat16_product
from compiled_mtp.ops.fp8 import dequantize, quantize, quantized_values
from compiled_mtp.ops.numerics import silu

# On a CPU a float32 matmul gives a row the same bits for every row count that is a multiple of 4 (measured).
_ROW_UNIT = 8


def _dequantize(weight: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    return weight.to(dtype) if scale is None else dequantize(weight, scale).to(dtype)


def _rows_by_expert(
    x: torch.Tensor, ids: torch.Tensor, experts: int
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """(expert, its (row, slot) pairs, their rows of x) for each expert that is asked.

    Rows are padded with zeros to a multiple of 8: no row's bits depend on its company.
    """
    expert_of_pair = ids.flatten().long()
    pairs = expert_of_pair.sort(stable=True).indices
    counts = torch.bincount(expert_of_pair, minlength=experts).tolist()
    start = 0
    for expert, count in enumerate(counts):
        if count == 0:
            continue
        chosen = pairs[start : start + count]
        start += count
        inputs = x.new_zeros(-(-count // _ROW_UNIT) * _ROW_UNIT, x.shape[1])
        inputs[:count] = x[chosen // ids.shape[1]]
        yield expert, chosen, inputs


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x @ weight.T in their dtype, as float32."""
    if x.dtype == torch.bfloat16:
        return bfloat16_product(x, weight).float()
    return F.linear(x, weight)


def _hidden_of(inputs: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of one expert, float32."""
    gate, up = _product(inputs, gate_up).chunk(2, dim=1)
    return silu(gate) * up


def _add_slots(outputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """[M, N]: the weighted sums of [M * slots, N], over the slots in order."""
    by_slot = outputs.view(*weights.shape, -1)
    total = weights[:, :1] * by_slot[:, 0]
    for slot in range(1, weights.shape[1]):
        total = total + weights[:, slot : slot + 1] * by_slot[:, slot]
    return total


def _multiply_and_add(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    stacks: tuple[torch.Tensor, torch.Tensor],
    scales: tuple[torch.Tensor | None, torch.Tensor | None],
    round_hidden: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """[M, H] float32, slots added in order; products in x's dtype, of hidden rows by `round_hidden`."""
    outputs = torch.empty((ids.numel(), stacks[1].shape[1]), dtype=torch.float32, device=x.device)
    for expert, chosen, inputs in _rows_by_expert(x, ids, stacks[0].shape[0]):
        gate_up, down = (
            _dequantize(stack[expert], None if scale is None else scale[expert], x.dtype)
            for stack, scale in zip(stacks, scales, strict=True)
        )
        outputs[chosen] = _product(round_hidden(_hidden_of(inputs, gate_up)), down)[: len(chosen)]
    return _add_slots(outputs, weights)


def multiply_gate_up(
    x: torch.Tensor, ids: torch.Tensor, gate_up: torch.Tensor, scale: torch.Tensor | None
) -> torch.Tensor:
    """[M * slots, I] float32: silu(gate) * up, pairs sorted by expert; a product in x's dtype."""
    parts = [x.new_empty((0, gate_up.shape[1] // 2), dtype=torch.float32)]
    for expert, chosen, inputs in _rows_by_expert(x, ids, gate_up.shape[0]):
        weight = _dequantize(gate_up[expert], None if scale is None else scale[expert], x.dtype)
        parts.append(_hidden_of(inputs, weight)[: len(chosen)])
    return torch.cat(parts)


def multiply_down(
    hidden: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    down: torch.Tensor,
    scale: torch.Tensor | None,
) -> torch.Tensor:
    """[M, N] float32 of `multiply_gate_up`'s pairs, rounded."""
    outputs = torch.empty((ids.numel(), down.shape[1]), dtype=torch.float32, device=hidden.device)
    in_place = torch.empty_like(hidden)
    in_place[ids.flatten().long().sort(stable=True).indices] = hidden
    # One slot a row: the pairs themselves.
    for expert, chosen, inputs in _rows_by_expert(in_place, ids.view(-1, 1), down.shape[0]):
        weight = _dequantize(down[expert], None if scale is None else scale[expert], hidden.dtype)
        outputs[chosen] = _product(inputs, weight)[: len(chosen)]
    return _add_slots(outputs, weights)


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
    stacks, scales = (gate_up, down), (gate_up_scale, down_scale)
    total = _multiply_and_add(x, weights, ids, stacks, scales, lambda hidden: hidden.to(x.dtype))
    return total.to(x.dtype)


def moe_experts_w8a8(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_scale: torch.Tensor | None,
    down_scale: torch.Tensor | None,
    out_float32: bool,
) -> torch.Tensor:
    def round_hidden(hidden: torch.Tensor) -> torch.Tensor:
        return quantized_values(*quantize(hidden if out_float32 else hidden.bfloat16()))

    stacks, scales = (gate_up, down), (gate_up_scale, down_scale)
    values = quantized_values(x, x_scale)
    total = _multiply_and_add(values, weights, ids, stacks, scales, round_hidden)
    return total if out_float32 else total.bfloat16()


def moe_hidden(
    x: torch.Tensor,
    ids: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor | None,
    prefill: bool,
) -> torch.Tensor:
    return multiply_gate_up(x, ids, gate_up, gate_up_scale).to(x.dtype)


def moe_sums(
    hidden: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    down: torch.Tensor,
    down_scale: torch.Tensor | None,
    prefill: bool,
) -> torch.Tensor:
    return multiply_down(hidden, weights, ids, down, down_scale).to(hidden.dtype)


def moe_hidden_w8a8(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    ids: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor | None,
    out_float32: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = multiply_gate_up(quantized_values(x, x_scale), ids, gate_up, gate_up_scale)
    return quantize(hidden if out_float32 else hidden.bfloat16())


def moe_sums_w8a8(
    hidden: torch.Tensor,
    hidden_scale: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    down: torch.Tensor,
    down_scale: torch.Tensor | None,
    out_float32: bool,
) -> torch.Tensor:
    values = quantized_values(hidden, hidden_scale)
    total = multiply_down(values, weights, ids, down, down_scale)
    return total if out_float32 else total.bfloat16()
