"""Weights in blocks of scaled codes: the kinds of GGUF files and FP4, their layout in memory, their values.

A weight [N, K] has a code for each value, and scales for each unit of 128 columns of a row; N is a multiple
of 16, K of 128. A unit is stored alone, so that a weight may be cut between units: the two halves of a
K-quant's super-block of 256 columns each keep d and dmin. A value is the float32 number s * q + o of its code
q, or s * table[q]; products round it once to bfloat16.

Words [N, W] int16: the units of 16 rows lie together, one after another; each unit holds, for the 16 rows in
order, 32 words of four bits of four codes: bits 4 i to 4 i + 3 of word j belong to column 32 i + j. A tensor
core takes 32 neighbouring columns from 32 neighbouring words without moving any. The four bits of an FP4 code
lie apart in their word, as FP4_PLACES has it: few instructions then move them to those of bfloat16. Behind
these words come, again for the 16 rows in order, what codes have above four bits:
- five bits: 16 words for two rows; bit 8 (i // 2) + i % 2 + 2 h of word j is the fifth bit of column
  32 i + 16 h + j, four bits higher for the second row;
- six bits: 16 words; bit 8 (i // 2) + 2 (i % 2 + 2 h) of word j and the next one belong to column
  32 i + 16 h + j: like those of codes i and i + 2 in the words above, they are eight bits apart;
- eight bits differ: the low byte of word j is column j, its high byte column 32 + j, and behind these words
  come 32 words for columns 64 + j and 96 + j.

Scales [K / 128, N, S] int16: S numbers for each unit of a row. Those of 16 rows lie together: the first two
of each row, then the next two of each, at last a single one of each. A kind with a factor per row has it, as
the bits of a float32, in the first two numbers of one more unit behind the last; it is applied to sums.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

UNIT = 128
"""Columns of a unit: a product takes whole units, and a weight may be cut between units."""
ROWS = 16
"""Rows whose words lie together: a weight may be cut at multiples of them."""
SLICES = 4
"""A unit has this number of slices, 32 columns each; a code's slice decides its bits of a word."""
_WORDS = UNIT // SLICES
_HALF = _WORDS // 2
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The numbers that the codes of IQ4_XS stand for."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The numbers that the codes of FP4 stand for."""


FP4_PLACES = ((6, 15), (3, 11), (0, 9), (12, 10))
"""Of each slice's FP4 code the first bit of exponent and mantissa in the word, and the bit of the sign."""


@dataclass(frozen=True)
class Kind:
    """How one kind of weight is stored.

    bits: of a code: 4, 5, 6 or 8. fields: S, the numbers of scales of a unit. group: columns that share a
    scale, 16 or 32. numbers(codes uint8): the float32 numbers q that they stand for. scales(fields [..., S]
    int16): s, and o or None, float32 [..., 128 / group]. has_factor: a float32 factor per row. scales_sums:
    products multiply the sum of a group's products by s, because numbers are exact in bfloat16 and o is
    None; else they take values rounded once to bfloat16.
    """

    name: str
    bits: int
    fields: int
    group: int
    numbers: Callable[[Tensor], Tensor]
    scales: Callable[[Tensor], tuple[Tensor, Tensor | None]]
    has_factor: bool = False
    scales_sums: bool = False

    @property
    def width(self) -> int:
        """Neighbouring columns that a product decodes at a time: 16 where their scales differ from the next
        16 columns', or their place in the bits above four does; else 32."""
        return 16 if self.group == 16 or self.bits == 5 else _WORDS

    @property
    def is_fp4(self) -> bool:
        """Whether codes are e2m1."""
        return self.name in ("NVFP4", "MXFP4")

    @property
    def words(self) -> int:
        """Words of a unit of a row."""
        return _WORDS * self.bits // 4

    def units(self, k: int) -> int:
        """Units of scales of `k` columns, the factors' included."""
        return k // UNIT + self.has_factor

    def columns(self, words: int) -> int:
        """Columns of a row of `words` words."""
        return words // self.words * UNIT

    @property
    def bits_per_value(self) -> float:
        """Bits that a value takes with its share of the scales; without factors per row."""
        return (self.words + self.fields) * 16 / UNIT


def _places_above(kind: Kind) -> dict[tuple[int, int], int]:
    """Where, in the words of what codes have above four bits, those of each slice and half of it begin."""
    width = kind.bits - 4
    return {(i, h): 8 * (i // 2) + width * (i % 2 + 2 * h) for i in range(SLICES) for h in range(2)}


def pack(codes: Tensor, kind: Kind) -> Tensor:
    """Return words [N, K / 128 * kind.words] int16 of codes [N, K] uint8; N a multiple of 16, K of 128."""
    n = codes.shape[0]
    # [blocks of 16 rows, units, 16, slices, 32]
    units = codes.view(-1, ROWS, codes.shape[1] // UNIT, SLICES, _WORDS).transpose(1, 2)
    slices = units.unbind(3)
    if kind.bits == 8:
        pairs = [_bytes_to_words(torch.stack(slices[at : at + 2], -1).flatten(-2)) for at in (0, 2)]
        return torch.cat([pair.flatten(2) for pair in pairs], 2).view(n, -1)
    words = torch.zeros_like(slices[0], dtype=torch.int32)
    for index, part in enumerate(slices):
        if kind.is_fp4:
            number, sign = FP4_PLACES[index]
            words |= (part & 7).to(torch.int32) << number | (part >> 3).to(torch.int32) << sign
        else:
            words |= (part & 15).to(torch.int32) << 4 * index
    planes = [words.to(torch.int16).flatten(2)]
    if kind.bits > 4:
        above = torch.zeros_like(words[..., :_HALF])
        for (index, half), at in _places_above(kind).items():
            above |= (slices[index] >> 4).to(torch.int32)[..., _HALF * half :][..., :_HALF] << at
        if kind.bits == 5:
            above = above[:, :, ::2] | above[:, :, 1::2] << 4
        planes.append(above.to(torch.int16).flatten(2))
    return torch.cat(planes, 2).view(n, -1)


def unpack(words: Tensor, kind: Kind) -> Tensor:
    """Return the codes [N, K] uint8 of `words`: the reverse of `pack`."""
    n = words.shape[0]
    planes = words.reshape(n // ROWS, -1, ROWS * kind.words)
    first = planes[..., : ROWS * _WORDS].unflatten(-1, (ROWS, _WORDS))
    others = planes[..., ROWS * _WORDS :]
    if kind.bits == 8:
        second = others.unflatten(-1, (ROWS, _WORDS))
        slices = [_words_to_bytes(plane)[..., half::2] for plane in (first, second) for half in (0, 1)]
    elif kind.is_fp4:
        parts = [(first >> number & 7) | (first >> sign & 1) << 3 for number, sign in FP4_PLACES]
        slices = [part.to(torch.uint8) for part in parts]
    else:
        slices = [(first >> 4 * index & 15).to(torch.uint8) for index in range(SLICES)]
    if kind.bits in (5, 6):
        above = others.to(torch.int32).unflatten(-1, (-1, _HALF))
        if kind.bits == 5:
            above = torch.stack((above, above >> 4), 3).flatten(2, 3)
        mask = (1 << kind.bits - 4) - 1
        for (index, half), at in _places_above(kind).items():
            own = slices[index][..., _HALF * half :][..., :_HALF]
            own |= ((above >> at & mask) << 4).to(torch.uint8)
    return torch.stack(slices, 3).transpose(1, 2).reshape(n, -1)


def pack_scales(fields: Tensor, kind: Kind, factor: Tensor | None = None) -> Tensor:
    """Return scales [units, N, S] int16 of `fields` [N, K / 128, S] int16.

    factor: [N] float32 for a kind with a factor per row, else None. N must be a multiple of 16.
    """
    assert (factor is not None) is kind.has_factor
    if factor is not None:
        last = fields.new_zeros(fields.shape[0], 1, kind.fields)
        last[:, 0, :2] = factor.contiguous().view(torch.int16).view(-1, 2)
        fields = torch.cat((fields, last), 1)
    units, n = fields.shape[1], fields.shape[0]
    blocks = fields.view(-1, ROWS, units, kind.fields).permute(2, 0, 1, 3)
    parts = [part.flatten(2) for part in blocks.split(2, 3)]
    return torch.cat(parts, 2).view(units, n, kind.fields)


def unpack_scales(scales: Tensor, kind: Kind) -> tuple[Tensor, Tensor | None]:
    """Return fields [N, K / 128, S] and factors [N] or None: the reverse of `pack_scales`."""
    units, n, _ = scales.shape
    blocks = scales.reshape(units, n // ROWS, kind.fields * ROWS)
    parts = [part.unflatten(2, (ROWS, -1)) for part in blocks.split(2 * ROWS, 2)]
    fields = torch.cat(parts, 3).permute(1, 2, 0, 3).reshape(n, units, kind.fields)
    if not kind.has_factor:
        return fields, None
    return fields[:, :-1].contiguous(), fields[:, -1, :2].contiguous().view(torch.float32)[:, 0]


def products(words: Tensor, scales: Tensor, kind: Kind) -> tuple[Tensor, Tensor | None]:
    """Return the float32 values [N, K] without factors per row, and these factors [N] or None."""
    fields, factor = unpack_scales(scales, kind)
    s, o = kind.scales(fields)
    numbers = kind.numbers(unpack(words, kind)).unflatten(1, (*s.shape[1:], kind.group))
    values = numbers * s[..., None]
    if o is not None:
        values += o[..., None]
    return values.flatten(1), factor


def values(words: Tensor, scales: Tensor, kind: Kind) -> Tensor:
    """Return the float32 values [N, K] of a weight."""
    found, factor = products(words, scales, kind)
    return found if factor is None else found * factor[:, None]


def _bytes_to_words(found: Tensor) -> Tensor:
    """[..., 2 m] uint8 -> [..., m] int16, the low byte first."""
    return found.contiguous().view(torch.int16)


def _words_to_bytes(words: Tensor) -> Tensor:
    return words.contiguous().view(torch.uint8)


def _half(fields: Tensor) -> Tensor:
    """The float32 values of float16 numbers whose bits are int16."""
    return fields.contiguous().view(torch.float16).float()


def _shifts(device: torch.device) -> Tensor:
    """0, 4 and 8. A list's numbers would have to be copied to a GPU, and the caller to wait for it."""
    return torch.arange(0, 12, 4, device=device)


def _affine_scales(fields: Tensor) -> tuple[Tensor, Tensor]:
    """d, dmin, and 12 bits for each slice: its scale of six bits, then its minimum. Those of the last slice
    lie in the four high bits of the others."""
    both = _half(fields[..., :2])
    twelve = fields[..., 2:].int() & 0xFFFF
    last = (twelve >> 12 << _shifts(fields.device)).sum(-1, keepdim=True)
    own = torch.cat((twelve & 0xFFF, last), -1)
    return both[..., :1] * (own & 63).float(), -(both[..., 1:] * (own >> 6).float())


def pack_affine(d: Tensor, dmin: Tensor, scales: Tensor, mins: Tensor) -> Tensor:
    """Return fields [..., 5] int16 of Q4_K and Q5_K.

    d, dmin [...]: float16; scales, mins [..., 4]: 0 to 63, of any integer dtype.
    """
    own = scales.int() | mins.int() << 6
    high = own[..., 3:] >> _shifts(own.device) & 15
    twelve = (own[..., :3] | high << 12).to(torch.int16)
    return torch.cat((torch.stack((d, dmin), -1).view(torch.int16), twelve), -1)


def _q6_scales(fields: Tensor) -> tuple[Tensor, None]:
    """d, and a signed byte for each 16 columns."""
    return _half(fields[..., :1]) * fields[..., 1:].contiguous().view(torch.int8).float(), None


def _half_scales(fields: Tensor) -> tuple[Tensor, None]:
    """A float16 number for each 32 columns."""
    return _half(fields), None


def _iq4_scales(fields: Tensor) -> tuple[Tensor, None]:
    """d, and six bits for each 32 columns, two in a number, which are 32 too large."""
    pairs = fields[..., 1:].int()
    six = torch.stack((pairs & 63, pairs >> 6 & 63), -1).flatten(-2)
    return _half(fields[..., :1]) * (six.float() - 32), None


def _e4m3_scales(fields: Tensor) -> tuple[Tensor, None]:
    """An e4m3 number for each 16 columns, which is not negative."""
    return fields.contiguous().view(torch.float8_e4m3fn).float(), None


def _e8m0_scales(fields: Tensor) -> tuple[Tensor, None]:
    """A byte b for each 32 columns, which means 2^(b - 127)."""
    stored = fields.contiguous().view(torch.uint8).int()
    return (stored << 23).view(torch.float32), None


def _look_up(table: tuple[float, ...]) -> Callable[[Tensor], Tensor]:
    return lambda codes: torch.tensor(table, dtype=torch.float32, device=codes.device)[codes.int()]


def _less(zero: int) -> Callable[[Tensor], Tensor]:
    return lambda codes: codes.float() - zero


KINDS = MappingProxyType(
    {
        kind.name: kind
        for kind in (
            Kind("Q4_K", 4, 5, 32, _less(0), _affine_scales),
            Kind("Q5_K", 5, 5, 32, _less(0), _affine_scales),
            Kind("Q6_K", 6, 5, 16, _less(32), _q6_scales, scales_sums=True),
            Kind("Q8_0", 8, 4, 32, _less(128), _half_scales),
            Kind("Q4_0", 4, 4, 32, _less(8), _half_scales, scales_sums=True),
            Kind("IQ4_XS", 4, 3, 32, _look_up(IQ4), _iq4_scales),
            Kind("NVFP4", 4, 4, 16, _look_up(E2M1), _e4m3_scales, has_factor=True),
            Kind("MXFP4", 4, 2, 32, _look_up(E2M1), _e8m0_scales),
        )
    }
)
"""Every kind by its name, which operators take."""
