"""Decodes units of scaled codes (ops.blocks) to bfloat16 values, 16 or 32 columns at a time.

A code in the last bits of float32's 2^23 is 2^23 + q, or 2^23 + 16 q where it stays at a higher bit: one
subtraction gives q, and a power of two in the scale undoes the shift. The bits of 2^23 are an argument of
kernels, because an instruction that combines bits takes only one constant. Every value is one float32 number,
s * q + o, rounded once to bfloat16; s * q is exact.
"""

from __future__ import annotations

import triton
import triton.language as tl

from compiled_mtp.ops.blocks import FP4_PLACES, IQ4

# The bits of 2^23: kernels get them as the argument `magic`.
MAGIC = 0x4B000000
TWO_23 = tl.constexpr(8388608.0)
FP4_DOWN = tl.constexpr(tuple(number for number, _ in FP4_PLACES))
FP4_SIGN_UP = tl.constexpr(tuple(31 - sign for _, sign in FP4_PLACES))


def _four_bytes(first: int) -> int:
    """Four of IQ4's numbers, each more by 128, as the bytes of an int32."""
    found = sum((IQ4[first + index] + 128) << 8 * index for index in range(4))
    return found - (1 << 32) if found >= 1 << 31 else found


IQ4_0, IQ4_4, IQ4_8, IQ4_12 = (tl.constexpr(_four_bytes(first)) for first in (0, 4, 8, 12))


@triton.jit
def load_codes(unit_at, row, WIDTH: tl.constexpr, KIND: tl.constexpr):
    """The words of a unit in tiles [WIDTH, BN], and at last what codes have above four bits, if they have.

    unit_at [BN]: where the unit begins for the 16 rows of each row; row [BN]: the row, 0 to 15.
    """
    word = tl.arange(0, WIDTH)[:, None]
    codes = (tl.load(unit_at[None, :] + (row * 32)[None, :] + word),)
    if WIDTH == 16:
        codes += (tl.load(unit_at[None, :] + (row * 32 + 16)[None, :] + word),)
    if KIND == "Q8_0":
        codes += (tl.load(unit_at[None, :] + (row * 32 + 512)[None, :] + word),)
    elif KIND == "Q6_K":
        codes += (tl.load(unit_at[None, :] + (row * 16 + 512)[None, :] + word),)
    elif KIND == "Q5_K":
        codes += (tl.load(unit_at[None, :] + (row // 2 * 16 + 512)[None, :] + word),)
    return codes


@triton.jit
def load_fields(fields_at, row, FIELDS: tl.constexpr):
    """The numbers of a unit's scales, two in an int32 [BN], at last one; fields_at: those of 16 rows.

    Copies to shared memory take at least four bytes, so that a single number comes with its neighbour's.
    """
    fields = ()
    for index in tl.static_range(FIELDS // 2):
        fields += (tl.load(fields_at + index * 16 + row),)
    if FIELDS % 2 == 1:
        both = tl.load(fields_at + FIELDS // 2 * 16 + row // 2)
        fields += (both >> (row % 2 * 16),)
    return fields


@triton.jit
def field_of(fields, INDEX: tl.constexpr):
    """Number INDEX, 0 to 65535, as int32."""
    return (fields[INDEX // 2] >> (INDEX % 2 * 16)) & 0xFFFF


@triton.jit
def half_of(fields, INDEX: tl.constexpr):
    """Number INDEX, a float16 number, as float32."""
    return field_of(fields, INDEX).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def signed_byte(bits, INDEX: tl.constexpr):
    """The signed byte number INDEX of a word, as float32."""
    return (bits << (24 - 8 * INDEX) >> 24).to(tl.float32)


@triton.jit
def e4m3_byte(bits, INDEX: tl.constexpr):
    """The e4m3 number in byte INDEX of a word, as float32: GPUs before Hopper have no instruction for it."""
    byte = bits >> (8 * INDEX)
    found = ((byte & 0x80) << 24) | ((byte & 0x7F) << 20)
    # The exponent of float32 is biased by 120 more.
    return found.to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit
def scales_of(fields, SLICE: tl.constexpr, HALF: tl.constexpr, KIND: tl.constexpr):
    """s and o [1, BN] of a slice's columns, or of one half of them, in float32; o is s if it is not used."""
    if KIND == "Q4_K" or KIND == "Q5_K":
        if SLICE < 3:
            twelve = field_of(fields, 2 + SLICE)
        else:
            twelve = field_of(fields, 2) >> 12
            twelve |= (field_of(fields, 3) >> 12) << 4
            twelve |= (field_of(fields, 4) >> 12) << 8
        s = half_of(fields, 0) * (twelve & 63).to(tl.float32)
        o = 0.0 - half_of(fields, 1) * ((twelve >> 6) & 63).to(tl.float32)
        return s[None, :], o[None, :]
    else:
        if KIND == "Q6_K":
            s = half_of(fields, 0) * signed_byte(field_of(fields, 1 + SLICE), HALF)
        elif KIND == "NVFP4":
            s = e4m3_byte(field_of(fields, SLICE), HALF)
        elif KIND == "MXFP4":
            byte = (field_of(fields, SLICE // 2) >> (8 * (SLICE % 2))) & 0xFF
            s = (byte << 23).to(tl.float32, bitcast=True)
        elif KIND == "IQ4_XS":
            six = (field_of(fields, 1 + SLICE // 2) >> (6 * (SLICE % 2))) & 63
            s = half_of(fields, 0) * (six - 32).to(tl.float32)
        else:
            s = half_of(fields, SLICE)
        return s[None, :], s[None, :]


@triton.jit
def number_of(bits, LESS: tl.constexpr):
    """The number in the last bits of 2^23, less LESS, as float32."""
    return bits.to(tl.float32, bitcast=True) - (TWO_23 + LESS)


@triton.jit
def decode_part(codes, fields, row, magic, PART: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr):
    """The bfloat16 values [WIDTH, BN] of part PART of a unit: WIDTH neighbouring columns."""
    SLICE: tl.constexpr = PART * WIDTH // 32
    HALF: tl.constexpr = PART * WIDTH % 32 // 16
    words = codes[HALF].to(tl.int32)
    # The 0 of a loaded number keeps the compiler from filling a tile with `magic`, and from computing shifts,
    # outside the loop, in a layout that is not the product's.
    zero = field_of(fields, 0) >> 16
    magic = (magic | zero)[None, :]
    s, o = scales_of(fields, SLICE, HALF, KIND)
    # Where a code stays at its bits of the word.
    down: tl.constexpr = 1.0 / (1 << (4 * SLICE))
    if KIND == "Q4_K":
        value = number_of((words & (15 << (4 * SLICE))) | magic, 0.0) * (s * down) + o
    elif KIND == "Q5_K":
        shift = row % 2 * 4 + zero
        above = codes[2].to(tl.int32) >> shift[None, :]
        high = (((above >> (SLICE // 2 * 8 + SLICE % 2 + 2 * HALF)) << 4) & 16) | magic
        code = ((words >> (4 * SLICE)) & 15) | high
        value = number_of(code, 0.0) * s + o
    elif KIND == "Q6_K":
        above = codes[2].to(tl.int32)
        high = (((above >> (SLICE // 2 * 8 + SLICE % 2 * 2 + 4 * HALF)) << 4) & 48) | magic
        code = ((words >> (4 * SLICE)) & 15) | high
        value = number_of(code, 32.0) * s
    elif KIND == "Q8_0":
        both = codes[SLICE // 2].to(tl.int32)
        if SLICE % 2 == 0:
            value = number_of((both & 0xFF) | magic, 128.0) * s
        else:
            value = number_of((both & 0xFF00) | magic, 32768.0) * (s * 0.00390625)
    elif KIND == "Q4_0":
        value = number_of((words & (15 << (4 * SLICE))) | magic, 8.0 * (1 << (4 * SLICE))) * (s * down)
    elif KIND == "IQ4_XS":
        code = words >> (4 * SLICE)
        low = tl.where((code & 4) == 0, IQ4_0, IQ4_4)
        high = tl.where((code & 4) == 0, IQ4_8, IQ4_12)
        four = tl.where((code & 8) == 0, low, high)
        value = number_of(((four >> ((code & 3) * 8)) & 0xFF) | magic, 128.0) * s
    else:
        # Exponent and mantissa of e2m1 as those of a tiny float32, and its sign.
        tiny = ((words << FP4_SIGN_UP[SLICE]) & (-1 << 31)) | (((words >> FP4_DOWN[SLICE]) & 7) << 22)
        value = tiny.to(tl.float32, bitcast=True) * 8.507059173023462e37 * s
    return value.to(tl.bfloat16)


@triton.jit
def factor_of(last_unit_at, row, KIND: tl.constexpr):
    """The float32 factors [BN] of rows, in the unit behind the last; zeros for kinds without any."""
    if KIND == "NVFP4":
        return tl.load(last_unit_at + row).to(tl.float32, bitcast=True)
    else:
        return tl.zeros(row.shape, tl.float32)
