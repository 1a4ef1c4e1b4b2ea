"""The specification of `quantize_rows`, and what runs on the CPU."""

from __future__ import annotations

import torch

from compiled_mtp.ops.fp8 import FP8_BLOCK

LARGEST = 448.0  # of e4m3
# A group that is smaller everywhere keeps a factor that float32 can divide by.
LEAST = 1e-10


def quantize_rows_reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = x.shape
    groups = x.float().reshape(rows, columns // FP8_BLOCK, FP8_BLOCK)
    scale = groups.abs().amax(-1).clamp(min=LEAST) / LARGEST
    # No value is above 448 by more than a rounding of the division, which e4m3 rounds back.
    values = (groups / scale[..., None]).to(torch.float8_e4m3fn)
    return values.reshape(rows, columns), scale
