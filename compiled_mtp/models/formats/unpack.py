"""Codes out of packed words, and which words hold them. Pure functions on tensors of any device."""

from __future__ import annotations

import torch

WORD_BITS = 32
# What the 4 bits of e2m1 stand for.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def covering(wanted: slice, unit: int) -> slice:
    """The range of units that holds the range `wanted` of what they are made of."""
    return slice(wanted.start // unit, -(-wanted.stop // unit))


def within(wanted: slice, unit: int) -> slice:
    """Where `wanted` lies in what `covering` gives, unpacked."""
    first = wanted.start // unit * unit
    return slice(wanted.start - first, wanted.stop - first)


def unpack_columns(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Words [M, W] int32, each of 32 / bits neighbouring columns, the lowest bits first, to int32 codes
    [M, W * 32 / bits]."""
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32, device=words.device)
    # A shift of a negative word brings ones, which the mask takes away.
    return ((words[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2)


def unpack_rows(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Words [W, M] int32, each of 32 / bits neighbouring rows, to int32 codes [W * 32 / bits, M]."""
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32, device=words.device)
    return ((words[:, None] >> shifts[:, None]) & ((1 << bits) - 1)).flatten(0, 1)


def unpack_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """Bytes [M, K / 2], the even column in the low half, to float32 values [M, K] of e2m1."""
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).int()
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], device=packed.device)
    return table[codes]


def groups_of(columns: slice, group: int, device: torch.device) -> torch.Tensor:
    """The group of each column, counted from the first one's: int64 [columns]."""
    return torch.arange(columns.start, columns.stop, device=device) // group - columns.start // group


def scaled(
    codes: torch.Tensor, zeros: torch.Tensor | int, scales: torch.Tensor, columns: torch.Tensor
) -> torch.Tensor:
    """(q - z) * s in float32: codes [n, k], zeros and scales [n, groups], the group of each column [k].

    q - z is exact, and with a scale of 16 bits the product too.
    """
    whole = codes - (zeros if isinstance(zeros, int) else zeros[:, columns])
    return whole.float() * scales.float()[:, columns]
