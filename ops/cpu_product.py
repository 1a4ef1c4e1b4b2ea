"""A float32 product on a CPU whose rows keep their bits, whatever the number of rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_mtp.ops.fp8 import FP8_BLOCK, dequantize
from compiled_mtp.ops.packed_weight import find_packed

# Measured: ATen's float32 product gives a row the same bits for every row count that is a multiple of 4, and
# other bits at 1, 2, 3, 5 and 7 rows.
ROW_UNIT = 4
WEIGHT_ROWS_PER_CAST = 8192


def product(x: Tensor, weight: Tensor, weight_scale: Tensor | None) -> Tensor:
    """x [M, K] @ weight [N, K].T in float32; weight_scale: the factors of an FP8 weight in blocks."""
    rows = x.shape[0]
    padded = x.float() if rows % ROW_UNIT == 0 else F.pad(x.float(), (0, 0, 0, -rows % ROW_UNIT))
    if weight.dtype == torch.float32:
        packed = find_packed(weight)
        y = F.linear(padded, weight) if packed is None else packed.product(padded)
        return y if padded is x else y[:rows]
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
    return y[:rows]
