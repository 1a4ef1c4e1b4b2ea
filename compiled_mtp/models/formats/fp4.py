"""FP4 (e2m1): NVFP4 of compressed-tensors and of modelopt, and MXFP4.

NVFP4: bytes [N, K / 2] of two columns each, `weight_scale` [N, K / 16] e4m3, and one factor per tensor:
compressed-tensors' `weight_global_scale` divides, modelopt's `weight_scale_2` multiplies. MXFP4: bytes, and
`weight_scale` [N, K / 32] bytes b that mean 2^(b - 127). The product of a code and its scale is exact; the
tensor's factor is applied after it, as one float32 operation. Scales of activations are not read: products
take plain rows. Sources: compressed-tensors, modelopt, the OCP specification of MX formats.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch

from compiled_mtp.errors import check
from compiled_mtp.models.formats.claims import Claims
from compiled_mtp.models.formats.unpack import covering, groups_of, unpack_e2m1, within
from compiled_mtp.models.formats.weight import AGAIN, PackedWeight
from compiled_mtp.ops.blocks import UNIT

_MANTISSA_BITS = 23  # of float32
# Exponents whose products with every code are normal numbers of bfloat16 and float32.
_LEAST, _MOST = 2, 252


class _FP4(PackedWeight):
    """A linear of e2m1 codes. packed: the last part of the name of its bytes. group: columns that share a
    scale."""

    packed: ClassVar[str] = "weight_packed"
    group: ClassVar[int] = 16
    kind_name: ClassVar[str] = "NVFP4"

    def measure(self, claims: Claims) -> tuple[int, int]:
        """Return N and K from the bytes. Raises ValueError for scales that do not fit them."""
        rows, half = self.check_matrix(self.packed)
        rule = f"hold whole groups of {self.group} columns"
        check(2 * half % self.group == 0, self.name, rule, 2 * half, AGAIN)
        self.check_shape("weight_scale", rows, 2 * half // self.group)
        return rows, 2 * half

    @property
    def kind(self) -> str | None:
        """The kind of scaled codes (ops.blocks) in which products can read it; None if they cannot."""
        return self.kind_name if self.shape[1] % UNIT == 0 else None

    def units(
        self, rows: slice, columns: slice, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Codes [n, k], fields [n, k / 128, S] and factors [n] or None of whole units."""
        packed = self.part(self.packed, rows, covering(columns, 2), device=device)
        codes = torch.stack((packed & 15, packed >> 4), -1).flatten(1)
        stored = self.part("weight_scale", rows, covering(columns, self.group), device=device)
        fields = stored.contiguous().view(torch.int16).unflatten(1, (codes.shape[1] // UNIT, -1))
        return codes, fields, self.row_factors(len(codes), device)

    def row_factors(self, rows: int, device: torch.device) -> torch.Tensor | None:
        """The factors [rows] of sums; None for a format without a tensor's factor."""
        return None

    @abstractmethod
    def scales(self, rows: slice, groups: slice, device: torch.device) -> torch.Tensor:
        """The float32 scales [rows, groups]."""

    def decode(self, rows: slice, columns: slice, device: torch.device) -> torch.Tensor:
        """The float32 values of these rows and columns."""
        packed = self.part(self.packed, rows, covering(columns, 2), device=device)
        codes = unpack_e2m1(packed)[:, within(columns, 2)]
        scales = self.scales(rows, covering(columns, self.group), device)
        return codes * scales[:, groups_of(columns, self.group, device)]


class NVFP4(_FP4):
    """A linear in compressed-tensors' NVFP4: the tensor's factor divides."""

    required: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "weight_packed": ("U8",),
        "weight_scale": ("F8_E4M3",),
        "weight_global_scale": ("F32",),
    }
    marked: ClassVar[Mapping[str, tuple[str, ...]]] = {"weight_packed": ("U8",)}
    unread = ("input_global_scale",)
    factor: ClassVar[str] = "weight_global_scale"
    dtype = "NVFP4"

    def measure(self, claims: Claims) -> tuple[int, int]:
        """Do what `_FP4` does, and raise ValueError unless the tensor has one factor."""
        factor = self.parts[self.factor]
        check(math.prod(factor.shape) == 1, factor.name, "be one factor", list(factor.shape), AGAIN)
        return super().measure(claims)

    def check_values(self) -> None:
        """Raise ValueError unless the scales are finite and the tensor's factor is positive."""
        self.check_finite("weight_scale")
        self.check_finite(self.factor, is_positive=True)

    def scales(self, rows: slice, groups: slice, device: torch.device) -> torch.Tensor:
        """The float32 scales without the tensor's factor."""
        return self.part("weight_scale", rows, groups, device=device).float()

    def decode(self, rows: slice, columns: slice, device: torch.device) -> torch.Tensor:
        """The float32 values of these rows and columns."""
        return self.finish(super().decode(rows, columns, device), self.whole(self.factor).to(device))

    def units(
        self, rows: slice, columns: slice, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Codes, fields and factors, as `_FP4` has them; codes take the signs of negative scales."""
        codes, fields, factors = super().units(rows, columns, device)
        signs = fields.flatten(1).view(torch.uint8) >> 7
        codes ^= signs.repeat_interleave(self.group, 1) << 3
        return codes, fields & 0x7F7F, factors

    def row_factors(self, rows: int, device: torch.device) -> torch.Tensor:
        """The tensor's factor, or what multiplies instead of it, for each row."""
        whole = self.whole(self.factor).float().reshape(1)
        return self.finish(torch.ones_like(whole), whole).to(device).expand(rows)

    def finish(self, values: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """Apply the tensor's factor to the values."""
        return values / factor


class ModeloptNVFP4(NVFP4):
    """A linear in modelopt's NVFP4: the tensor's factor multiplies."""

    required: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "weight": ("U8",),
        "weight_scale": ("F8_E4M3",),
        "weight_scale_2": ("F32",),
    }
    marked: ClassVar[Mapping[str, tuple[str, ...]]] = {"weight": ("U8",)}
    unread = ("input_scale",)
    packed = "weight"
    factor = "weight_scale_2"

    def finish(self, values: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """Apply the tensor's factor to the values."""
        return values * factor


class MXFP4(_FP4):
    """A linear in MXFP4, as compressed-tensors stores it."""

    required: ClassVar[Mapping[str, tuple[str, ...]]] = {"weight_packed": ("U8",), "weight_scale": ("U8",)}
    group = 32
    kind_name = "MXFP4"
    dtype = "MXFP4"

    def check_values(self) -> None:
        """Raise ValueError for an exponent whose products with codes are not all normal numbers."""
        ends = torch.stack(torch.aminmax(self.whole("weight_scale"))).tolist()
        wrong = [end for end in ends if not _LEAST <= end <= _MOST]
        rule = f"lie in {_LEAST} to {_MOST}"
        check(not wrong, self.parts["weight_scale"].name, rule, wrong[:1], AGAIN)

    def scales(self, rows: slice, groups: slice, device: torch.device) -> torch.Tensor:
        """The float32 scales, powers of two."""
        stored = self.part("weight_scale", rows, groups, device=device)
        # The bias is float32's, so the byte holds the bits of a float32 exponent.
        return (stored.int() << _MANTISSA_BITS).view(torch.float32)
