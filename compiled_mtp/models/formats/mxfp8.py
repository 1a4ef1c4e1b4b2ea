"""MXFP8, as compressed-tensors, modelopt and AutoRound store it.

`weight` [N, K] e4m3, `weight_scale` [N, K / 32] bytes b that mean 2^(b - 127). Products of a code and its
scale are exact in float32 and bfloat16, except below their smallest normal number. Source: the OCP
specification of MX formats.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from compiled_mtp.errors import check
from compiled_mtp.models.formats.claims import Claims
from compiled_mtp.models.formats.unpack import covering, groups_of
from compiled_mtp.models.formats.weight import AGAIN, PackedWeight

_GROUP = 32
# A byte of this value means NaN.
_BIAS, _NAN = 127, 255


class MXFP8(PackedWeight):
    """A linear in MXFP8."""

    required: ClassVar[Mapping[str, tuple[str, ...]]] = {"weight": ("F8_E4M3",), "weight_scale": ("U8",)}
    unread = ("input_scale",)
    dtype = "MXFP8"

    def measure(self, claims: Claims) -> tuple[int, int]:
        """Return N and K. Raises ValueError for scales that do not fit them."""
        rows, columns = self.check_matrix("weight")
        check(columns % _GROUP == 0, self.name, f"hold whole groups of {_GROUP} columns", columns, AGAIN)
        self.check_shape("weight_scale", rows, columns // _GROUP)
        return rows, columns

    def check_values(self) -> None:
        """Raise ValueError for a scale that is NaN."""
        most = int(self.whole("weight_scale").max())
        check(most < _NAN, self.parts["weight_scale"].name, f"be at most {_NAN - 1}", most, AGAIN)

    def decode(self, rows: slice, columns: slice, device: torch.device) -> torch.Tensor:
        """The float32 values of these rows and columns."""
        codes = self.part("weight", rows, columns, device=device).float()
        stored = self.part("weight_scale", rows, covering(columns, _GROUP), device=device)
        exponents = (stored.int() - _BIAS)[:, groups_of(columns, _GROUP, device)]
        return torch.ldexp(codes, exponents)
