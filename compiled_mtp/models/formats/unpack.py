"""Unpacks codes from packed words, and finds the words that hold them. Pure functions, for any device."""

from __future__ import annotations

import torch

WORD_BITS = 32
# The values of e2m1's codes without the sign bit.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def covering(wanted: slice, unit: int) -> slice:
    """The range of units, of `unit` elements each, that covers the range `wanted` of elements."""
    return slice(wanted.start // unit, -(-wanted.stop // unit))


def within(wanted: slice, unit: int) -> slice:
    """The range `wanted` relative to the first element of the units that `covering` returns."""
    first = wanted.start // unit * unit
    return slice(wanted.start - first, wanted.stop - first)


def unpack_columns(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack words [M, W] int32, each of 32 / bits neighbouring columns, the lowest bits first, to int32
    codes [M, W * 32 / bits]."""
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32, device=words.device)
    # A shift of a negative word fills with ones, which the mask removes.
    return ((words[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2)


def unpack_rows(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack words [W, M] int32, each of 32 / bits neighbouring rows, to int32 codes [W * 32 / bits, M]."""
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32, device=words.device)
    return ((words[:, None] >> shifts[:, None]) & ((1 << bits) - 1)).flatten(0, 1)


def unpack_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """Unpack bytes [M, K / 2], the even column in the low four bits, to float32 values [M, K] of e2m1."""
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).int()
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], device=packed.device)
    return table[codes]


def groups_of(columns: slice, group: int, device: torch.device) -> torch.Tensor:
    """The group of each column, counted from the first column's group: int64 [columns]."""
    return torch.arange(columns.start, columns.stop, device=device) // group - columns.start // group


def scaled(
    codes: torch.Tensor, zeros: torch.Tensor | int, scales: torch.Tensor, columns: torch.Tensor
) -> torch.Tensor:
    """(q - z) * s in float32, of codes [n, k], zeros and scales [n, groups], and each column's group [k].

    q - z is exact; with 16-bit scales the product is exact too.
    """
    whole = codes - (zeros if isinstance(zeros, int) else zeros[:, columns])
    return whole.float() * scales.float()[:, columns]
