"""Four-bit weights: how the codes lie in words, and which numbers they stand for.

A weight [N, K] is 4-bit codes q with a scale s and a zero point z for each row and each group of 32, 64 or
128 columns: W = (q - z) * s. K is a multiple of 128. A unit of 128 columns of a row is 32 words of 16 bits;
bits 4 i to 4 i + 3 of word j hold column 32 i + j, so that a tensor core takes 32 neighbouring columns out of
32 neighbouring words without moving any. Sixteen rows of a unit lie one after another, a KiB, and the units
of sixteen rows too: memory is read in long runs however few columns a step takes. The scale and the zero
point of a group lie in one word of 32 bits: the scale's 16 bits low, and high the bfloat16 number -(128 + z),
which is what decoding adds.
"""

from __future__ import annotations

import torch

UNIT = 128
"""Columns of a unit: what a step of a product takes, and what a weight may be cut at."""
GROUPS = (32, 64, 128)
"""The numbers of columns that may share a scale."""
ROWS = 16
"""Rows whose words lie together: what a weight's rows may be cut at."""
_SLICES = 4
_WORDS = UNIT // _SLICES
# The bits of bfloat16's -128: the zero point is in its last ones.
_MINUS_128 = 0xC300


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Words [N, K / 4] int16 of codes [N, K] uint8, 0 to 15; N is a multiple of ROWS."""
    parts = codes.unflatten(1, (-1, _SLICES, _WORDS)).unbind(2)
    words = parts[0].to(torch.int32)
    for index, part in enumerate(parts[1:], 1):
        words |= part.to(torch.int32) << 4 * index
    blocks = words.to(torch.int16).unflatten(0, (-1, ROWS)).transpose(1, 2)
    return blocks.reshape(codes.shape[0], codes.shape[1] // _SLICES)


def unpack(words: torch.Tensor) -> torch.Tensor:
    """Codes [N, K] uint8 of words [N, K / 4] int16: the reverse of `pack`."""
    blocks = words.view(-1, words.shape[1] // _WORDS, ROWS, _WORDS)
    units = blocks.transpose(1, 2).reshape(words.shape[0], -1, 1, _WORDS)
    shifts = torch.arange(0, 16, 4, dtype=torch.int16, device=words.device)[:, None]
    return ((units >> shifts) & 15).to(torch.uint8).flatten(1)


def pack_groups(scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """Groups [K / group, N, 2] of scales [N, K / group] float16 or bfloat16, whose dtype they have, and zero
    points [N, K / group] of 0 to 16, which version 1 of GPTQ reaches."""
    minus = (zeros.to(torch.int32) | _MINUS_128).to(torch.int16).view(scales.dtype)
    return torch.stack((scales, minus), -1).transpose(0, 1).contiguous()


def unpack_groups(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales [N, K / group] and zero points [N, K / group] uint8: the reverse of `pack_groups`."""
    scales, minus = groups.transpose(0, 1).unbind(-1)
    return scales.contiguous(), (minus.contiguous().view(torch.int16) & 127).to(torch.uint8)


def dequantize(words: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """The float32 values [N, K] of words [N, K / 4] with groups [K / group, N, 2]: exact."""
    codes, (scales, zeros) = unpack(words), unpack_groups(groups)
    group = codes.shape[1] // scales.shape[1]
    whole = codes.unflatten(1, (-1, group)).float() - zeros[..., None].float()
    return (whole * scales[..., None].float()).flatten(1)
