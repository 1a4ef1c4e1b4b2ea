"""Four-bit weights: the layout of their codes in words, and the numbers that the codes stand for.

A weight [N, K] is 4-bit codes q with a scale s and a zero point z for each row and each group of 32, 64 or
128 columns: W = (q - z) * s. K is a multiple of 128. A unit of 128 columns of a row is 32 words of 16 bits;
bits 4 i to 4 i + 3 of word j hold column 32 i + j, so that a tensor core takes 32 neighbouring columns from
32 neighbouring words without moving any. The words of 16 rows of a unit lie together, one KiB, and the units
of these rows follow one another: a kernel reads long runs of memory even if a step takes few columns. The
scale and the zero point of a group share a word of 32 bits: the low half is the scale, and the high half is
the bfloat16 number -(128 + z), which decoding adds.
"""

from __future__ import annotations

import torch

UNIT = 128
"""Columns of a unit: a product takes whole units, and a weight may be cut between units."""
GROUPS = (32, 64, 128)
"""Allowed group sizes, in columns: the columns of a group share a scale."""
ROWS = 16
"""Rows whose words lie together: a weight may be cut at multiples of them."""
_SLICES = 4
_WORDS = UNIT // _SLICES
# Rows that `quantize_weight` holds in float32 at a time.
_ROWS_AT_ONCE = 2048
# The bits of the bfloat16 number -128; the zero point goes into its lowest bits.
_MINUS_128 = 0xC300


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Return the words [N, K / 4] int16 of codes [N, K] uint8, 0 to 15; N is a multiple of ROWS."""
    parts = codes.unflatten(1, (-1, _SLICES, _WORDS)).unbind(2)
    words = parts[0].to(torch.int32)
    for index, part in enumerate(parts[1:], 1):
        words |= part.to(torch.int32) << 4 * index
    blocks = words.to(torch.int16).unflatten(0, (-1, ROWS)).transpose(1, 2)
    return blocks.reshape(codes.shape[0], codes.shape[1] // _SLICES)


def unpack(words: torch.Tensor) -> torch.Tensor:
    """Return the codes [N, K] uint8 of words [N, K / 4] int16: the reverse of `pack`."""
    blocks = words.view(-1, words.shape[1] // _WORDS, ROWS, _WORDS)
    units = blocks.transpose(1, 2).reshape(words.shape[0], -1, 1, _WORDS)
    shifts = torch.arange(0, 16, 4, dtype=torch.int16, device=words.device)[:, None]
    return ((units >> shifts) & 15).to(torch.uint8).flatten(1)


def pack_groups(scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """Return groups [K / group, N, 2] in the dtype of `scales`.

    scales [N, K / group]: float16 or bfloat16. zeros [N, K / group]: 0 to 16; version 1 of GPTQ has 16.
    """
    minus = (zeros.to(torch.int32) | _MINUS_128).to(torch.int16).view(scales.dtype)
    return torch.stack((scales, minus), -1).transpose(0, 1).contiguous()


def unpack_groups(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales [N, K / group] and zero points [N, K / group] uint8: the reverse of `pack_groups`."""
    scales, minus = groups.transpose(0, 1).unbind(-1)
    return scales.contiguous(), (minus.contiguous().view(torch.int16) & 127).to(torch.uint8)


def quantize_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the words [N, K / 4] and the groups [K / UNIT, N, 2] in bfloat16 of the nearest codes of a
    weight [N, K]; N is a multiple of ROWS, K of UNIT.

    The codes of a group of UNIT columns reach from its least value, or 0, to its largest value, or 0.
    """
    n, k = weight.shape
    words = torch.empty((n, k // _SLICES), dtype=torch.int16, device=weight.device)
    groups = torch.empty((k // UNIT, n, 2), dtype=torch.bfloat16, device=weight.device)
    for first in range(0, n, _ROWS_AT_ONCE):
        rows = weight[first : first + _ROWS_AT_ONCE].float().unflatten(1, (-1, UNIT))
        least, largest = rows.amin(-1).clamp(max=0.0), rows.amax(-1).clamp(min=0.0)
        scale = ((largest - least) / 15).bfloat16()
        scale = torch.where(scale == 0.0, 1.0, scale)
        zeros = (-least / scale).round().clamp(0, 15)
        codes = (rows / scale[..., None] + zeros[..., None]).round().clamp(0, 15)
        words[first : first + len(rows)] = pack(codes.to(torch.uint8).flatten(1))
        groups[:, first : first + len(rows)] = pack_groups(scale, zeros)
    return words, groups


def values_of_rows(words: torch.Tensor, groups: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the exact float32 values [n, K] of the rows `ids` [n] int64; see `dequantize`."""
    blocks = words.view(words.shape[0] // ROWS, -1, ROWS, _WORDS)
    units = blocks[ids // ROWS, :, ids % ROWS]
    shifts = torch.arange(0, 16, 4, dtype=torch.int16, device=words.device)[:, None]
    codes = ((units[:, :, None] >> shifts) & 15).to(torch.uint8).flatten(1)
    return _scaled(codes, groups[:, ids])


def dequantize(words: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Return the exact float32 values [N, K] of words [N, K / 4] with groups [K / group, N, 2]."""
    return _scaled(unpack(words), groups)


def _scaled(codes: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    scales, zeros = unpack_groups(groups)
    group = codes.shape[1] // scales.shape[1]
    whole = codes.unflatten(1, (-1, group)).float() - zeros[..., None].float()
    return (whole * scales[..., None].float()).flatten(1)
