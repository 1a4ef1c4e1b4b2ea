"""FP4 (e2m1): NVFP4 of compressed-tensors and of modelopt, and MXFP4.

NVFP4: bytes [N, K / 2] of two columns each, `weight_scale` [N, K / 16] e4m3, and one factor for the tensor:
compressed-tensors' `weight_global_scale` divides, modelopt's `weight_scale_2` multiplies. MXFP4: bytes, and
`weight_scale` [N, K / 32] bytes b that stand for 2^(b - 127). The product of a code and its scale is exact;
the factor of the tensor comes after it, as one float32 operation. Scales of activations are not read: rows
are multiplied as they are. Sources: compressed-tensors, modelopt, the OCP specification of MX formats.
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
from compiled_mtp.models.headers import Header

_MANTISSA_BITS = 23  # of float32
# Exponents whose products with every code are normal numbers of bfloat16 and float32.
_LEAST, _MOST = 2, 252


class _FP4(PackedWeight):
    """A linear of e2m1 codes. packed: the ending of the name of its bytes. group: columns that share a
    scale."""

    packed: ClassVar[str] = "weight_packed"
    group: ClassVar[int] = 16

    def measure(self, claims: Claims) -> tuple[int, int]:
        """From the bytes; the scales must fit them."""
        rows, half = self.check_matrix(self.packed)
        rule = f"hold whole groups of {self.group} columns"
        check(2 * half % self.group == 0, self.name, rule, 2 * half, AGAIN)
        self.check_shape("weight_scale", rows, 2 * half // self.group)
        return rows, 2 * half

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
    """A linear in compressed-tensors' NVFP4, whose factor of the tensor divides."""

    required: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "weight_packed": ("U8",),
        "weight_scale": ("F8_E4M3",),
        "weight_global_scale": ("F32",),
    }
    unread = ("input_global_scale",)
    factor: ClassVar[str] = "weight_global_scale"
    dtype = "NVFP4"

    @classmethod
    def marks(cls, parts: Mapping[str, Header]) -> bool:
        """Packed bytes."""
        return "weight_packed" in parts and parts["weight_packed"].dtype == "U8"

    def measure(self, claims: Claims) -> tuple[int, int]:
        """See `_FP4`; there is one factor of the tensor."""
        factor = self.parts[self.factor]
        check(math.prod(factor.shape) == 1, factor.name, "be one factor", list(factor.shape), AGAIN)
        return super().measure(claims)

    def check_values(self) -> None:
        """Finite scales, a positive factor."""
        self.check_finite("weight_scale")
        self.check_finite(self.factor, is_positive=True)

    def scales(self, rows: slice, groups: slice, device: torch.device) -> torch.Tensor:
        """The float32 scales without the factor of the tensor."""
        return self.part("weight_scale", rows, groups, device=device).float()

    def decode(self, rows: slice, columns: slice, device: torch.device) -> torch.Tensor:
        """The float32 values of these rows and columns."""
        return self.finish(super().decode(rows, columns, device), self.whole(self.factor).to(device))

    def finish(self, values: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """Bring the factor of the tensor in."""
        return values / factor


class ModeloptNVFP4(NVFP4):
    """A linear in modelopt's NVFP4, whose factor of the tensor multiplies."""

    required: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "weight": ("U8",),
        "weight_scale": ("F8_E4M3",),
        "weight_scale_2": ("F32",),
    }
    unread = ("input_scale",)
    packed = "weight"
    factor = "weight_scale_2"

    @classmethod
    def marks(cls, parts: Mapping[str, Header]) -> bool:
        """Bytes under the name of plain weights."""
        return "weight" in parts and parts["weight"].dtype == "U8"

    def finish(self, values: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """Bring the factor of the tensor in."""
        return values * factor


class MXFP4(_FP4):
    """A linear in MXFP4, as compressed-tensors stores it."""

    required: ClassVar[Mapping[str, tuple[str, ...]]] = {"weight_packed": ("U8",), "weight_scale": ("U8",)}
    group = 32
    dtype = "MXFP4"

    @classmethod
    def marks(cls, parts: Mapping[str, Header]) -> bool:
        """Packed bytes with bytes as scales."""
        is_packed = "weight_packed" in parts and parts["weight_packed"].dtype == "U8"
        return is_packed and "weight_scale" in parts and parts["weight_scale"].dtype == "U8"

    def check_values(self) -> None:
        """Exponents whose products are normal numbers."""
        stored = self.whole("weight_scale")
        wrong = stored[(stored < _LEAST) | (stored > _MOST)]
        rule = f"lie in {_LEAST} to {_MOST}"
        check(not len(wrong), self.parts["weight_scale"].name, rule, wrong[:1].tolist(), AGAIN)

    def scales(self, rows: slice, groups: slice, device: torch.device) -> torch.Tensor:
        """Powers of two."""
        stored = self.part("weight_scale", rows, groups, device=device)
        # The bias is float32's own: the byte is the exponent's bits.
        return (stored.int() << _MANTISSA_BITS).view(torch.float32)
