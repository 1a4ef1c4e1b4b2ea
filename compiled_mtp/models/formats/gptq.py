"""GPTQ, and AutoRound's auto_gptq: integers of 4 or 8 bits, packed along the columns, with zero points.

`qweight` [K * bits / 32, N], `qzeros` [K / g, N * bits / 32], `scales` [K / g, N], maybe `g_idx` [K].
W[n, k] = (q[k, n] - z[i, n] - offset) * scales[i, n]; the offset is 1 (version 1) or 0 (version 2). The group
i is k // g, or with desc_act (act-order) g_idx[k].
Scales may be negative. Sources: AutoGPTQ and GPTQModel; AutoRound.
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
    within,
)
from compiled_mtp.models.formats.weight import FLOATS

_PACKINGS = "other packings (gemv, gemv_fast, marlin) and other numbers of bits are not supported"


class GPTQ(IntegerWeight):
    """A linear in GPTQ's packing."""

    scales = "scales"
    indices = "g_idx"

    required: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "qweight": ("I32", "I16"),
        "qzeros": ("I32",),
        "scales": FLOATS,
    }
    optional: ClassVar[Mapping[str, tuple[str, ...]]] = {"g_idx": ("I32", "I64")}
    # `catalogue.FORMATS` tries AWQ before.
    marked: ClassVar[Mapping[str, tuple[str, ...]]] = {"qweight": ()}

    @property
    def dtype(self) -> str:
        """The format in words."""
        version = 1 if self.zero_offset else 2
        order = "" if self.is_in_order else ", act-order"
        return f"GPTQ int{self.bits} (version {version}), groups of {self.group}{order}"

    def measure(self, claims: Claims) -> tuple[int, int]:
        """Return N and K, and set the bits, the group size and the zero offset.

        N follows from the scales, the bits from the words of zero points for N rows, K from the words.
        """
        (words, rows), (groups, scale_rows) = self.check_matrix("qweight"), self.check_matrix("scales")
        zero_groups, zero_words = self.check_matrix("qzeros")
        is_packed = self.parts["qweight"].dtype == "I32" and rows == scale_rows and zero_groups == groups
        shapes = ", ".join(f"{name} {list(self.parts[name].shape)}" for name in self.required)
        check(is_packed, self.name, "be packed as GPTQ or AWQ (gemm) packs", shapes, _PACKINGS)
        bits = WORD_BITS * zero_words / rows
        check(bits in (4, 8), self.name, "have 4 or 8 bits", f"{bits:g}", _PACKINGS)
        self.bits = int(bits)
        columns = words * WORD_BITS // self.bits
        self.group = self.find_group("scales", columns, groups, claims)
        self.find_order(columns, claims)
        self._find_offset(claims)
        return rows, columns

    def _find_offset(self, claims: Claims) -> None:
        """Set zero_offset, the number added to a stored zero point, and only_zero.

        The offset is config.json's if given. Else the first word of zero points decides: in a symmetric
        weight without an offset it holds the middle code; otherwise the offset is 1.
        """
        middle = 1 << (self.bits - 1)
        said = claims.zero_offset
        first = slice(0, 1)
        if said is None and claims.is_symmetric is not False:
            codes = unpack_columns(self.part("qzeros", first, first), self.bits)
            said = 0 if bool((codes == middle).all()) else 1
        self.zero_offset = 1 if said is None else said
        # The value of all stored zero points if the weight must be symmetric, else None.
        is_told = claims.is_symmetric or (claims.zero_offset is None and self.zero_offset == 0)
        self.only_zero = middle - self.zero_offset if is_told else None

    def check_values(self) -> None:
        """Raise ValueError unless indices are right (`check_indices`), scales are finite, and a symmetric
        weight's zero points are all equal."""
        super().check_values()
        if self.only_zero is not None:
            # A word holds 32 / bits codes; equal codes make equal words.
            both = torch.stack(torch.aminmax(self.whole("qzeros")))
            zeros = unpack_columns(both, self.bits)
            other = zeros[zeros != self.only_zero]
            rule = f"hold {self.only_zero} alone, as symmetric weights of this version do"
            remedy = "correct sym or checkpoint_format (gptq, gptq_v2) in config.json"
            check(not len(other), self.parts["qzeros"].name, rule, other[:1].tolist(), remedy)

    def codes(
        self, rows: slice, columns: slice, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor | int, torch.Tensor]:
        """The codes, zero points and scales."""
        per_word, groups = WORD_BITS // self.bits, self.groups(columns)
        # Transpose the words before unpacking: they are fewer than the codes.
        words = self.part("qweight", covering(columns, per_word), rows, device=device).T.contiguous()
        codes = unpack_columns(words, self.bits)[:, within(columns, per_word)]
        zero_words = self.part("qzeros", groups, covering(rows, per_word), device=device)
        zeros = unpack_columns(zero_words, self.bits)[:, within(rows, per_word)] + self.zero_offset
        scales = self.part("scales", groups, rows, device=device)
        return codes, zeros.T, scales.T
