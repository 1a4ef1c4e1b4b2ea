"""`moe_experts` on a CPU: each expert's rows gathered and multiplied together."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from compiled_mtp.ops.cpu_product import bfloat16_product
from compiled_mtp.ops.fp8 import dequantize, quantize, quantized_values
from compiled_mtp.ops.k_splits import add_tree, count_cpu_k_splits
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


def _k_splits_of(hidden: torch.Tensor, down: torch.Tensor, k_splits: int) -> torch.Tensor:
    """[shares or 1, M, N] float32: one expert's second product, in so many shares of the hidden columns."""
    if not k_splits:
        return _product(hidden, down)[None]
    columns = down.float().unflatten(1, (k_splits, -1)).permute(1, 2, 0)
    return torch.bmm(hidden.float().unflatten(1, (k_splits, -1)).transpose(0, 1), columns)


def _add_slots(outputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """[M, N]: the weighted sums of [shares, M * slots, N], each share over its slots in order."""
    by_slot = outputs.view(len(outputs), *weights.shape, -1)
    total = weights[:, :1] * by_slot[:, :, 0]
    for slot in range(1, weights.shape[1]):
        total = total + weights[:, slot : slot + 1] * by_slot[:, :, slot]
    return add_tree(total)


def _multiply_and_add(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    stacks: tuple[torch.Tensor, torch.Tensor],
    scales: tuple[torch.Tensor | None, torch.Tensor | None],
    round_hidden: Callable[[torch.Tensor], torch.Tensor],
    k_splits: int = 0,
) -> torch.Tensor:
    """[M, H] float32, slots added in order; products in x's dtype, of hidden rows by `round_hidden`.

    With `k_splits` the second product is made in so many shares of the width, in float32, each of which is
    summed over a row's slots before they are added: so a rank may hold some of them.
    """
    shape = (max(k_splits, 1), ids.numel(), stacks[1].shape[1])
    outputs = torch.empty(shape, dtype=torch.float32, device=x.device)
    for expert, chosen, inputs in _rows_by_expert(x, ids, stacks[0].shape[0]):
        gate_up, down = (
            _dequantize(stack[expert], None if scale is None else scale[expert], x.dtype)
            for stack, scale in zip(stacks, scales, strict=True)
        )
        result = _k_splits_of(round_hidden(_hidden_of(inputs, gate_up)), down, k_splits)
        outputs[:, chosen] = result[:, : len(chosen)]
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
    k_splits: int = 0,
) -> torch.Tensor:
    """[M, N] float32 of `multiply_gate_up`'s pairs, rounded; shares as for `moe_experts`."""
    shape = (max(k_splits, 1), ids.numel(), down.shape[1])
    outputs = torch.empty(shape, dtype=torch.float32, device=hidden.device)
    in_place = torch.empty_like(hidden)
    in_place[ids.flatten().long().sort(stable=True).indices] = hidden
    # One slot a row: the pairs themselves.
    for expert, chosen, inputs in _rows_by_expert(in_place, ids.view(-1, 1), down.shape[0]):
        weight = _dequantize(down[expert], None if scale is None else scale[expert], hidden.dtype)
        outputs[:, chosen] = _k_splits_of(inputs, weight, k_splits)[:, : len(chosen)]
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
    whole_width: int,
) -> torch.Tensor:
    stacks, scales = (gate_up, down), (gate_up_scale, down_scale)
    width, whole = down.shape[2], whole_width or down.shape[2]
    k_splits = count_cpu_k_splits(whole) * width // whole
    total = _multiply_and_add(x, weights, ids, stacks, scales, lambda hidden: hidden.to(x.dtype), k_splits)
    return total.to(x.dtype if width == whole else torch.float32)


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
    x: torch.Tensor, ids: torch.Tensor, gate_up: torch.Tensor, gate_up_scale: torch.Tensor | None
) -> torch.Tensor:
    return multiply_gate_up(x, ids, gate_up, gate_up_scale).to(x.dtype)


def moe_sums(
    hidden: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    down: torch.Tensor,
    down_scale: torch.Tensor | None,
) -> torch.Tensor:
    k_splits = count_cpu_k_splits(down.shape[2])
    return multiply_down(hidden, weights, ids, down, down_scale, k_splits).to(hidden.dtype)


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
