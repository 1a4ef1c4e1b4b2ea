"""FP8 and int8 with a factor per row or per tensor: compressed-tensors' float-quantized and int-quantized,
modelopt's and AutoRound's FP8.

`weight` [N, K] e4m3 or int8, `weight_scale` [N, 1], [N] or [1]. W = weight * weight_scale. The static scale
of activations (`input_scale`) is not read: products take plain rows. FP8 in blocks of 128 by 128 is another
format, which operators read without multiplying it out (`weight_format.FP8`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch

from compiled_mtp.errors import check
from compiled_mtp.models.formats.claims import Claims
from compiled_mtp.models.formats.weight import AGAIN, FLOATS, PackedWeight

_KINDS = {"F8_E4M3": "FP8", "I8": "int8"}


class ScaledBytes(PackedWeight):
    """A linear in FP8 or int8 with a factor per row or per tensor."""

    required: ClassVar[Mapping[str, tuple[str, ...]]] = {"weight": tuple(_KINDS), "weight_scale": FLOATS}
    marked: ClassVar[Mapping[str, tuple[str, ...]]] = {"weight": tuple(_KINDS), "weight_scale": ()}
    unread = ("input_scale",)

    @property
    def dtype(self) -> str:
        """The format in words."""
        kind = _KINDS[self.parts["weight"].dtype]
        return f"{kind}, a scale a {'row' if self.has_row_scales else 'tensor'}"

    def measure(self, claims: Claims) -> tuple[int, int]:
        """Return N and K of the values. Raises ValueError unless there is one scale, or one per row."""
        rows, columns = self.check_matrix("weight")
        scale = self.parts["weight_scale"]
        self.has_row_scales = scale.shape in ((rows,), (rows, 1)) and rows > 1
        rule = f"be one factor, one for each of {rows} rows, or one for each block of 128 by 128"
        is_one = math.prod(scale.shape) == 1
        check(self.has_row_scales or is_one, scale.name, rule, list(scale.shape), AGAIN)
        return rows, columns

    def check_values(self) -> None:
        """Raise ValueError unless the scales are finite."""
        self.check_finite("weight_scale")

    def decode(self, rows: slice, columns: slice, device: torch.device) -> torch.Tensor:
        """The float32 values of these rows and columns."""
        values = self.part("weight", rows, columns, device=device).float()
        scale = self.whole("weight_scale").float().reshape(-1, 1).to(device)
        return values * (scale[rows] if self.has_row_scales else scale)
