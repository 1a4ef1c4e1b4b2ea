"""`linear` on a CPU: products padded so that rows keep their bits, and weights cast in parts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_mtp.ops.fp8 import FP8_BLOCK, dequantize
from compiled_mtp.ops.numerics import silu

# Measured: ATen's float32 product gives a row the same bits for every row count that is a multiple of 4, and
# other bits at 1, 2, 3, 5 and 7 rows.
ROW_UNIT = 4
WEIGHT_ROWS_PER_CAST = 8192


def linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor | None,
    out_float32: bool,
    prefill: bool,
    whole_n: int = 0,
    whole_k: int = 0,
) -> Tensor:
    if x.dtype == torch.bfloat16 and weight_scale is None and not out_float32:
        return F.linear(x, weight)
    rows, in_features = x.shape
    if rows % ROW_UNIT == 0:
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


def linear_silu_mul(
    x: Tensor, weight: Tensor, weight_scale: Tensor | None, whole_n: int, whole_k: int
) -> Tensor:
    gate, up = linear(x, weight, weight_scale, False, False).float().chunk(2, dim=-1)
    return (silu(gate) * up).to(x.dtype)


def linear_parts(
    x: Tensor, weight: Tensor, weight_scale: Tensor | None, count: int, whole_n: int, whole_k: int
) -> Tensor:
    assert count == 1, "count_parts is 1 on a CPU"
    return linear(x, weight, weight_scale, False, False)[None]
