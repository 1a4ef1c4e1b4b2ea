"""AWQ's "gemm" packing, and AutoRound's auto_awq: integers of 4 bits, packed along the rows, interleaved.

`qweight` [K, N / 8], `qzeros` [K / g, N / 8], `scales` [K / g, N]. A word holds 8 neighbouring rows n in the
order 0, 2, 4, 6, 1, 3, 5, 7. W[n, k] = (q[k, n] - z[k // g, n]) * scales[k // g, n]. Source: AutoAWQ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from compiled_mtp.models.formats.claims import Claims
from compiled_mtp.models.formats.integers import IntegerWeight
from compiled_mtp.models.formats.unpack import covering, unpack_rows, within
from compiled_mtp.models.formats.weight import FLOATS
from compiled_mtp.models.headers import Header

_BITS, _PER_WORD = 4, 8
# For row 8 w + j the index of its code in word w.
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


def unpack_interleaved(words: torch.Tensor) -> torch.Tensor:
    """Unpack words [M, W] int32 to int32 codes [8 W, M]: one row of codes per row of the weight."""
    # Transpose the words before unpacking: they are eight times fewer than the codes.
    codes = unpack_rows(words.T.contiguous(), _BITS).unflatten(0, (-1, _PER_WORD))
    return codes[:, list(_PLACES)].flatten(0, 1)


class AWQ(IntegerWeight):
    """A linear in AWQ's packing for matrix products."""

    scales = "scales"
    bits = _BITS

    required: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "qweight": ("I32",),
        "qzeros": ("I32",),
        "scales": FLOATS,
    }

    @classmethod
    def marks(cls, parts: Mapping[str, Header]) -> bool:
        """Whether `qweight` has one word per eight columns of `scales`."""
        if "qweight" not in parts or "scales" not in parts:
            return False
        words, scales = parts["qweight"].shape, parts["scales"].shape
        return len(words) == len(scales) == 2 and words[1] * _PER_WORD == scales[1]

    @property
    def dtype(self) -> str:
        """The format in words."""
        return f"AWQ int4, groups of {self.group}"

    def measure(self, claims: Claims) -> tuple[int, int]:
        """Return N and K: N from the scales, K from the words."""
        (columns, words), (groups, rows) = self.check_matrix("qweight"), self.check_matrix("scales")
        self.check_shape("qzeros", groups, words)
        self.group = self.find_group("scales", columns, groups, claims)
        return rows, columns

    def codes(
        self, rows: slice, columns: slice, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor | int, torch.Tensor]:
        """The codes, zero points and scales."""
        words, groups, own = covering(rows, _PER_WORD), covering(columns, self.group), within(rows, _PER_WORD)
        codes = unpack_interleaved(self.part("qweight", columns, words, device=device))[own]
        zeros = unpack_interleaved(self.part("qzeros", groups, words, device=device))[own]
        scales = self.part("scales", groups, rows, device=device)
        return codes, zeros, scales.T
