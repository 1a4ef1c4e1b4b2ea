"""compressed-tensors' pack-quantized: integers of 4 or 8 bits, packed along the columns of each row.

`weight_packed` [N, ceil(K * bits / 32)], `weight_scale` [N, K / g] or [N, 1], `weight_shape` [2]; asymmetric
weights also have `weight_zero_point` [ceil(N * bits / 32), K / g], packed along N. Half of the range is added
to codes and zero points before they are stored. W = (q - z) * scale. With actorder "group", the group of each
column is in `weight_g_idx` [K]. Source: compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from compiled_mtp.errors import check
from compiled_mtp.models.formats.claims import Claims
from compiled_mtp.models.formats.integers import IntegerWeight
from compiled_mtp.models.formats.unpack import (
    WORD_BITS,
    covering,
    unpack_columns,
    unpack_rows,
    within,
)
from compiled_mtp.models.formats.weight import AGAIN, FLOATS


class PackQuantized(IntegerWeight):
    """A linear in compressed-tensors' packing of integers."""

    scales = "weight_scale"
    indices = "weight_g_idx"

    required: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "weight_packed": ("I32",),
        "weight_scale": FLOATS,
        "weight_shape": ("I64", "I32"),
    }
    optional: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "weight_zero_point": ("I32",),
        "weight_g_idx": ("I32", "I64"),
    }
    # `catalogue.FORMATS` tries formats of bytes before.
    marked: ClassVar[Mapping[str, tuple[str, ...]]] = {"weight_packed": ()}

    @property
    def dtype(self) -> str:
        """The format in words."""
        kind = "asymmetric " if "weight_zero_point" in self.parts else ""
        order = "" if self.is_in_order else ", act-order"
        return f"pack-quantized {kind}int{self.bits}, groups of {self.group}{order}"

    def measure(self, claims: Claims) -> tuple[int, int]:
        """Return N and K of `weight_shape`. Raises ValueError for words or scales that do not fit them."""
        self.check_shape("weight_shape", 2)
        stored_rows, words = self.check_matrix("weight_packed")
        rows, columns = self.whole("weight_shape").tolist()
        name = self.parts["weight_shape"].name
        check(rows == stored_rows, name, f"begin with {stored_rows} rows", rows, AGAIN)
        bits = [bits for bits in (4, 8) if -(-columns * bits // WORD_BITS) == words]
        rule = f"give 4 or 8 bits in {words} words a row"
        check(columns > 0 and len(bits) == 1, name, rule, f"{columns} columns", AGAIN)
        self.bits = bits[0]
        _, groups = self.check_matrix("weight_scale")
        self.check_shape("weight_scale", rows, groups)
        self.group = self.find_group("weight_scale", columns, groups, claims)
        if "weight_zero_point" in self.parts:
            self.check_shape("weight_zero_point", -(-rows * self.bits // WORD_BITS), groups)
        self.find_order(columns, claims)
        return rows, columns

    def codes(
        self, rows: slice, columns: slice, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor | int, torch.Tensor]:
        """The codes, zero points and scales."""
        per_word, groups = WORD_BITS // self.bits, self.groups(columns)
        words = self.part("weight_packed", rows, covering(columns, per_word), device=device)
        codes = unpack_columns(words, self.bits)[:, within(columns, per_word)]
        zeros: torch.Tensor | int = 1 << (self.bits - 1)
        if "weight_zero_point" in self.parts:
            # The same number was added to codes and zero points, so it cancels out.
            packed = self.part("weight_zero_point", covering(rows, per_word), groups, device=device)
            zeros = unpack_rows(packed, self.bits)[within(rows, per_word)]
        scales = self.part("weight_scale", rows, groups, device=device)
        return codes, zeros, scales
