"""`moe_experts` on a CPU: each expert's rows gathered and multiplied together."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from compiled_mtp.ops.fp8 import dequantize, quantize, quantized_values
from compiled_mtp.ops.numerics import silu
from compiled_mtp.ops.shares import add_tree, cpu_share_count

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


def _multiply_and_add(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    stacks: tuple[torch.Tensor, torch.Tensor],
    scales: tuple[torch.Tensor | None, torch.Tensor | None],
    round_hidden: Callable[[torch.Tensor], torch.Tensor],
    shares: int = 0,
) -> torch.Tensor:
    """[M, H] float32, slots added in order; products in x's dtype, of hidden rows by `round_hidden`.

    With `shares` the second product is made in so many shares of the width, in float32, each of which is
    summed over a row's slots before they are added: so a rank may hold some of them.
    """
    rows, slots = ids.shape
    shape = (max(shares, 1), rows * slots, stacks[1].shape[1])
    outputs = torch.empty(shape, dtype=torch.float32, device=x.device)
    for expert, chosen, inputs in _rows_by_expert(x, ids, stacks[0].shape[0]):
        gate_up, down = (
            _dequantize(stack[expert], None if scale is None else scale[expert], x.dtype)
            for stack, scale in zip(stacks, scales, strict=True)
        )
        gate, up = F.linear(inputs, gate_up).to(torch.float32).chunk(2, dim=1)
        hidden = round_hidden(silu(gate) * up)
        if shares:
            columns = down.float().unflatten(1, (shares, -1)).permute(1, 2, 0)
            result = torch.bmm(hidden.float().unflatten(1, (shares, -1)).transpose(0, 1), columns)
        else:
            result = F.linear(hidden, down).to(torch.float32)[None]
        outputs[:, chosen] = result[:, : len(chosen)]
    by_slot = outputs.view(len(outputs), rows, slots, -1)
    total = weights[:, :1] * by_slot[:, :, 0]
    for slot in range(1, slots):
        total = total + weights[:, slot : slot + 1] * by_slot[:, :, slot]
    return add_tree(total)


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
    shares = cpu_share_count(whole) * width // whole
    total = _multiply_and_add(x, weights, ids, stacks, scales, lambda hidden: hidden.to(x.dtype), shares)
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
