"""The specification of `linear`, and what runs on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from compiled_mtp.ops.fp8 import FP8_BLOCK, dequantize
from compiled_mtp.ops.numerics import silu
from compiled_mtp.ops.shares import add_tree, share_count

# Measured: ATen's float32 product gives a row the same bits for every row count that is a multiple of 4, and
# other bits at 1, 2, 3, 5 and 7 rows.
ROW_UNIT = 4
WEIGHT_ROWS_PER_CAST = 8192


def linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    out_float32: bool,
    prefill: bool,
    whole_shape: Sequence[int] | None = None,
) -> torch.Tensor:
    if x.dtype == torch.bfloat16 and weight_scale is None and not out_float32:
        return F.linear(x, weight)
    rows, in_features = x.shape
    if prefill or rows % ROW_UNIT == 0:
        padded = x.float()
    else:
        padded = x.new_zeros((-(-rows // ROW_UNIT) * ROW_UNIT, in_features), dtype=torch.float32)
        padded[:rows] = x
    if weight.dtype == torch.float32:
        y = F.linear(padded, weight)
    else:
        # Cast in parts: a float32 copy of a whole output projection may not fit.
        y = padded.new_empty((padded.shape[0], weight.shape[0]))
        for first in range(0, weight.shape[0], WEIGHT_ROWS_PER_CAST):
            part = slice(first, first + WEIGHT_ROWS_PER_CAST)
            if weight_scale is None:
                part_f32 = weight[part].float()
            else:
                first_scale = first // FP8_BLOCK
                scales = weight_scale[first_scale : first_scale + WEIGHT_ROWS_PER_CAST // FP8_BLOCK]
                part_f32 = dequantize(weight[part], scales)
            y[:, part] = F.linear(padded, part_f32)
    return y[:rows].to(torch.float32 if out_float32 else x.dtype)


def linear_silu_mul_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    whole_shape: Sequence[int] | None = None,
) -> torch.Tensor:
    gate, up = linear_reference(x, weight, weight_scale, False, False).float().chunk(2, dim=-1)
    return (silu(gate) * up).to(x.dtype)


def linear_parts_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    count: int,
    whole_shape: Sequence[int] | None = None,
) -> torch.Tensor:
    if count == 1:
        return linear_reference(x, weight, weight_scale, False, False)[None]
    k = whole_shape[1] if whole_shape else x.shape[1]
    length = k // share_count(k)
    shares = []
    for first in range(0, x.shape[1], length):
        columns = slice(first, first + length)
        blocks = slice(first // FP8_BLOCK, (first + length) // FP8_BLOCK)
        scale = None if weight_scale is None else weight_scale[:, blocks]
        shares.append(linear_reference(x[:, columns], weight[:, columns], scale, True, False))
    size = len(shares) // count
    return torch.stack([add_tree(shares[first : first + size]) for first in range(0, len(shares), size)])
