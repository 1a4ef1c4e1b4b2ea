"""The scales, minima and zero points of packed codes, as products with decoded weight rows read them.

The words of a unit's scales are its `fields`, each [BN] int32, a number of 16 bits in each half. Kinds are
those of ops.left_decode.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from compiled_mtp.ops.left_assembly import fp4_scale_program, is_affine, is_fp4, is_int4
from compiled_mtp.ops.left_operand import as_float


@gluon.constexpr_function
def words_of_scales(kind, fields):
    """Words of 32 bits that hold the scales of a unit of a row."""
    return fields if is_int4(kind) else (fields + 1) // 2


@gluon.jit
def field_step(n, FIELDS: gl.constexpr, KIND: gl.constexpr):
    """The words from one load of scales to the next."""
    if is_int4(KIND):
        return n
    else:
        return n // 2 * FIELDS


@gluon.jit
def fields_of(weight_scale, row, n, FIELDS: gl.constexpr, KIND: gl.constexpr):
    """Where the scales of weight rows `row` [BN] begin, and the words from one load to the next."""
    if is_int4(KIND):
        return weight_scale + row, field_step(n, FIELDS, KIND)
    else:
        return weight_scale + row // 16 * (8 * FIELDS), field_step(n, FIELDS, KIND)


@gluon.jit
def field_addresses(fields_at, row, step, unit, FIELDS: gl.constexpr, KIND: gl.constexpr):
    """Where the words of the scales of a unit lie. A single number comes with its neighbour's.

    fields_at, step: as `fields_of` returns them. row [BN]: the row in its block of 16.
    """
    addresses = ()
    if is_int4(KIND):
        for group in gl.static_range(FIELDS):
            addresses += (fields_at + (unit * FIELDS + group) * step,)
    else:
        for pair in gl.static_range(FIELDS // 2):
            addresses += (fields_at + unit * step + pair * 16 + row,)
        if FIELDS % 2 == 1:
            addresses += (fields_at + unit * step + FIELDS // 2 * 16 + row // 2,)
    return addresses


@gluon.jit
def load_fields(
    fields_at, row, step, first, last, COUNT: gl.constexpr, FIELDS: gl.constexpr, KIND: gl.constexpr
):
    """The words of the scales of units `first` to first + COUNT - 1, at most `last`."""
    fields = ()
    for index in gl.static_range(COUNT):
        unit = gl.minimum(first + index, last)
        addresses = field_addresses(fields_at, row, step, unit, FIELDS, KIND)
        for word in gl.static_range(len(addresses)):
            fields += (gl.load(addresses[word]),)
    return fields


@gluon.jit
def own_fields(fields, row, FIELDS: gl.constexpr, KIND: gl.constexpr):
    """The words of a unit's scales, without a neighbour's number."""
    if FIELDS % 2 == 0 or is_int4(KIND):
        return fields
    else:
        own = fields[: FIELDS // 2]
        own += (fields[FIELDS // 2] >> (row % 2 * 16),)
        return own


@gluon.jit
def field_of(fields, INDEX: gl.constexpr):
    """Number INDEX of a unit's scales, 0 to 65535, as int32."""
    return (fields[INDEX // 2] >> (INDEX % 2 * 16)) & 0xFFFF


@gluon.jit
def minus_zero_point(group):
    """-z / 64 as two bfloat16 numbers, of the number -(128 + z) in the high half of a group's word."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 part, two;
        prmt.b32 $0, $1, $1, 0x3232;
        mov.b32 part, 0x3C803C80;
        mov.b32 two, 0x40004000;
        fma.rn.bf16x2 $0, $0, part, two;
        }
        """,
        "=&r,r",
        [group],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def half_in(word, HIGH: gl.constexpr):
    """The float16 number in the low or the high half of a word, as float32."""
    half: gl.constexpr = "high" if HIGH else "low"
    return gl.inline_asm_elementwise(
        "{ .reg .b16 low, high; mov.b32 {low, high}, $1; cvt.f32.f16 $0, " + half + "; }",
        "=f,r",
        [word],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def half_of(fields, INDEX: gl.constexpr):
    """Number INDEX, a float16 number, as float32."""
    return half_in(fields[INDEX // 2], INDEX % 2 == 1)


@gluon.jit
def whole(bits, LESS: gl.constexpr):
    """bits - LESS as float32; bits below 2^23."""
    return as_float(bits | 0x4B000000) - (8388608.0 + LESS)


@gluon.jit
def signed_byte_times(word, INDEX: gl.constexpr, factor):
    """Byte INDEX of a word, -128 to 127, times a factor of eleven bits, in float32."""
    # Each byte with its sign bit inverted, more by 128, in the last eight of 2^15's sixteen bits: 2^15 + 128
    # times the factor is exact.
    bits = gl.inline_asm_elementwise(
        f"prmt.b32 $0, $1, 0x47000000, 0x76{INDEX}4;", "=r,r", [word ^ -0x7F7F7F80], dtype=gl.int32,
        is_pure=True, pack=1,
    )  # fmt: skip
    return gl.fma(as_float(bits), factor, factor * -32896.0)


@gluon.jit
def twelve_of(fields, SLICE: gl.constexpr):
    """The scale and the minimum of a slice, six bits each, in the last bits of a word."""
    if SLICE == 3:
        twelve = (fields[1] >> 12) & 0xF
        twelve |= (fields[1] >> 24) & 0xF0
        return twelve | ((fields[2] >> 4) & 0xF00)
    elif SLICE == 1:
        return fields[1] >> 16
    else:
        return fields[1 + SLICE // 2]


@gluon.jit
def times_bits(word, MASK: gl.constexpr, factor):
    """The number in the bits MASK of a word, below 2^23, times a factor, in float32."""
    return gl.fma(as_float((word & MASK) | 0x4B000000), factor, factor * -8388608.0)


@gluon.jit
def affine_of(fields, SLICE: gl.constexpr, KIND: gl.constexpr):
    """2^-48 s [BN] of a slice's columns, with the power of two that undoes where codes lie, and 2^-48 o."""
    up: gl.constexpr = 2.0 ** (101 - (4 * SLICE if KIND == "Q4_K" else SLICE // 2 * 8))
    twelve = twelve_of(fields, SLICE)
    # Six bits that stay where they are, 64 times as large.
    o = times_bits(twelve, 0xFC0, half_of(fields, 1) * -(2.0**-54))
    return times_bits(twelve, 63, half_of(fields, 0) * up), o


@gluon.jit
def scale_of(fields, SLICE: gl.constexpr, HALF: gl.constexpr, KIND: gl.constexpr):
    """s [BN] of a slice's columns, or of one half of them, in float32."""
    if KIND == "INT4":
        return half_in(fields[SLICE * len(fields) // 4], False)
    elif KIND == "INT4_BF16":
        return as_float(fields[SLICE * len(fields) // 4] << 16)
    elif KIND == "Q6_K":
        return signed_byte_times(fields[(1 + SLICE) // 2], (1 + SLICE) % 2 * 2 + HALF, half_of(fields, 0))
    elif KIND == "IQ4_XS":
        six = (field_of(fields, 1 + SLICE // 2) >> (6 * (SLICE % 2))) & 63
        return half_of(fields, 0) * whole(six, 32.0)
    else:
        return half_of(fields, SLICE)


@gluon.jit
def fp4_scale(fields, SLICE: gl.constexpr, HALF: gl.constexpr, KIND: gl.constexpr):
    """The scale [BN] of a slice's columns, or of one half of them, as two bfloat16 numbers in an int32; of
    NVFP4 for an even slice the first and for an odd slice the second of them."""
    if KIND == "NVFP4":
        word = fields[SLICE // 2]
        index: gl.constexpr = HALF
    else:
        word = fields[0]
        index: gl.constexpr = SLICE
    return gl.inline_asm_elementwise(
        fp4_scale_program(KIND, index), "=&r,r", [word], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def value_scales(fields, SLICE: gl.constexpr, HALF: gl.constexpr, KIND: gl.constexpr):
    """What the values of a slice's columns, or of one half of them, need besides codes, each [BN]: the
    operands of ops.left_assembly.program_of behind the words."""
    if is_int4(KIND):
        return (minus_zero_point(fields[SLICE * len(fields) // 4]),)
    elif is_affine(KIND):
        return affine_of(fields, SLICE, KIND)
    elif is_fp4(KIND):
        return (fp4_scale(fields, SLICE, HALF, KIND),)
    elif KIND == "Q4_0" or KIND == "Q6_K":
        return ()
    else:
        return (scale_of(fields, SLICE, HALF, KIND),)
