"""Decodes parts of units of packed codes in the registers of a tensor core's left operand.

A kind is a name in ops.blocks.KINDS, or INT4 or INT4_BF16: codes of ops.int4 with scales in float16 or
bfloat16. Two neighbouring columns share a register. Kinds that scale sums give the exact numbers q of their
codes, less their zero points. The others give values, one float32 number s * q + o rounded once to bfloat16.
A code in the last bits of float32's 2^23 is 2^23 + q: one subtraction gives q. Codes with offsets need none:
in the last bits of 0 a code is 2^-149 q, or 2^(k - 149) q where it stays k bits higher, and a power of two in
the scale undoes that. No float32 scale is large enough for all of it; the sum lacks 2^48 (`finish`).
In the last eight bits of bfloat16's 0 a code is 2^-133 q; times 2^127, less its zero point, it lacks 2^6.
FP4 is exact in bfloat16: exponent and mantissa of a code are those of a tiny number. NVFP4's sum lacks 2^16.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from compiled_mtp.ops.blocks import FP4_PLACES, IQ4
from compiled_mtp.ops.left_operand import as_float, spread, weight_row

# The bits of 2^23.
MAGIC = "0x4B000000"


@gluon.constexpr_function
def is_int4(kind):
    return kind in ("INT4", "INT4_BF16")


@gluon.constexpr_function
def is_affine(kind):
    """Whether values are s * q + o, made of codes in the last bits of 0."""
    return kind in ("Q4_K", "Q5_K")


@gluon.constexpr_function
def _subtracted(less):
    """The end of a program: 128 + less is subtracted from two bfloat16 numbers in `field`."""
    minus = 0xC300 + less
    return f"""
        mov.b32 low, 0x3f803f80;
        mov.b32 high, 0x{minus << 16 | minus:08X};
        fma.rn.bf16x2 $0, field, low, high;
        """


@gluon.constexpr_function
def _scaled(inputs):
    """The end of a program: two codes `low` and `high` in 2^23, less 128, scaled and rounded.

    inputs: registers before the scales of the two columns.
    """
    return f"""
        sub.rn.f32 low, low, 0f4B000080;
        sub.rn.f32 high, high, 0f4B000080;
        mul.rn.f32 low, low, ${inputs + 1};
        mul.rn.f32 high, high, ${inputs + 2};
        cvt.rn.bf16x2.f32 $0, high, low;
        """


@gluon.constexpr_function
def _affine(inputs):
    """The end of a program: two codes `low` and `high` in the last bits of 0, scaled, moved and rounded.

    inputs: registers before the scales and the offsets of the two columns.
    """
    return f"""
        fma.rn.f32 low, low, ${inputs + 1}, ${inputs + 3};
        fma.rn.f32 high, high, ${inputs + 2}, ${inputs + 4};
        cvt.rn.bf16x2.f32 $0, high, low;
        """


@gluon.constexpr_function
def _program(body):
    """Assembly with three registers of its own."""
    return "{\n.reg .b32 field, low, high;\n" + body + "\n}"


@gluon.constexpr_function
def _moved(register, source, left):
    """`source` moved by `left` bits, or to the right."""
    return (
        f"shl.b32 {register}, {source}, {left};" if left >= 0 else f"shr.u32 {register}, {source}, {-left};"
    )


@gluon.constexpr_function
def _affine_in_place(index):
    """Codes of four bits that stay where they are in their word: 2^(4 index) times as large."""
    mask = f"0x{15 << 4 * index:X}"
    return _program(
        f"""
        shr.u32 field, $1, 16;
        and.b32 low, $1, {mask};
        and.b32 high, field, {mask};
        """
        + _affine(1)
    )


@gluon.constexpr_function
def _from_two_words(bits, part):
    """Codes of five or six bits of slices i % 2 and i % 2 + 2 in `field`, the latter eight bits higher; their
    upper bits come from a second word. Two parts have `field` in common, and a compiler makes it once."""
    index, half = part // 2, part % 2
    return f"""
        shr.u32 field, $1, {4 * (index % 2)};
        {_moved("high", "$2", 4 - (bits - 4) * (index % 2 + 2 * half))}
        lop3.b32 field, field, high, 0x0f0f0f0f, 0xe4;
        """


@gluon.constexpr_function
def _affine_from_two_words(part):
    """Codes of five bits. Those of slices 2 and 3 are 2^8 times as large."""
    mask = f"0x{31 << 8 * (part // 4):X}"
    return _program(
        _from_two_words(5, part)
        + f"""
        and.b32 low, field, {mask};
        shr.u32 high, field, 16;
        and.b32 high, high, {mask};
        """
        + _affine(2)
    )


@gluon.constexpr_function
def _numbers_from_two_words(part):
    """Codes of six bits, less 32, 2^-6 times."""
    return _program(
        _from_two_words(6, part)
        + f"""
        shr.u32 field, field, {8 * (part // 4)};
        and.b32 field, field, 0x003f003f;
        mov.b32 low, 0x7F007F00;
        mov.b32 high, 0xBF00BF00;
        fma.rn.bf16x2 $0, field, low, high;
        """
    )


@gluon.constexpr_function
def _numbers(index):
    """Codes of four bits, less 8: a code in the last bits of bfloat16's 128 is 128 + q."""
    return _program(
        f"""
        shr.u32 field, $1, {4 * index};
        lop3.b32 field, field, 0x000f000f, 0x43004300, 0xea;
        """
        + _subtracted(8)
    )


@gluon.constexpr_function
def _bytes(index: int) -> str:
    """Codes of eight bits, two in a word. `prmt` takes bytes by number: 0 to 3 of a register, 4 to 7 of the
    next."""
    first = index % 2
    return _program(
        f"""
        prmt.b32 low, $1, {MAGIC}, 0x744{first};
        prmt.b32 high, $1, {MAGIC}, 0x744{2 + first};
        """
        + _scaled(1)
    )


@gluon.constexpr_function
def _looked_up(index: int) -> str:
    """Byte `index` of two registers."""
    return _program(
        f"""
        prmt.b32 low, $1, {MAGIC}, 0x744{index};
        prmt.b32 high, $2, {MAGIC}, 0x744{index};
        """
        + _scaled(2)
    )


@gluon.constexpr_function
def _less_zero_point(index: int) -> str:
    """Codes of four bits, less zero points, 2^-6 times. $2: -z / 64.

    The eighth bit belongs to the exponent, but bfloat16's two least exponents mean the same.
    """
    moved = "shr.u32 field, $1, 8;" if index >= 2 else "mov.b32 field, $1;"
    mask, factor = ("0x00f000f0", "0x7D007D00") if index % 2 else ("0x000f000f", "0x7F007F00")
    return _program(
        f"""
        {moved}
        and.b32 field, field, {mask};
        mov.b32 low, {factor};
        fma.rn.bf16x2 $0, field, low, $2;
        """
    )


@gluon.constexpr_function
def _fp4(index: int) -> str:
    """Sign, exponent and mantissa moved to those of two bfloat16 numbers `field`, 2^-126 times as large."""
    number, sign = FP4_PLACES[index]
    # An exponent of bfloat16 ends at bit 7, a sign is bit 15.
    if sign - number == 9:
        both = _moved("field", "$1", 6 - number) + "and.b32 field, field, 0x81C081C0;"
    else:
        both = (
            _moved("field", "$1", 6 - number)
            + _moved("high", "$1", 15 - sign)
            + "and.b32 high, high, 0x80008000;"
            + "lop3.b32 field, field, 0x01C001C0, high, 0xea;"
        )
    return both + "mov.b32 high, 0x80008000;"


@gluon.constexpr_function
def _mxfp4(index: int) -> str:
    """Codes times 2^126 and their scale."""
    return _program(
        _fp4(index)
        + """
        mov.b32 low, 0x7e807e80;
        fma.rn.bf16x2 field, field, low, high;
        fma.rn.bf16x2 $0, field, $2, high;
        """
    )


@gluon.constexpr_function
def _nvfp4(index: int) -> str:
    """Codes times 2^110 of their scale: an even slice's is the first of $2, an odd slice's the second."""
    half = "second" if index % 2 else "first"
    return _program(
        _fp4(index)
        + f"""
        .reg .b16 first, second;
        mov.b32 {{first, second}}, $2;
        mov.b32 low, {{{half}, {half}}};
        fma.rn.bf16x2 $0, field, low, high;
        """
    )


def _four_bytes(first: int) -> int:
    """Four of IQ4's numbers, each more by 128."""
    return sum((IQ4[first + index] + 128) << 8 * index for index in range(4))


# The numbers of the four codes of a word, as bytes, for two words: codes below and above 8 are looked up in
# tables of eight bytes, and the fourth bit of a code chooses. 0x80 or 0xFF, that bit's copies, are made by
# the lookup that repeats a byte's highest bit.
IQ4_BYTES = gl.constexpr(
    "{\n.reg .b32 codes, low, high, choice, one, two;\n"
    + "\n".join(
        f"""
        {"mov.b32 codes, $2;" if word == 0 else "shr.u32 codes, $2, 16;"}
        mov.b32 one, 0x80808080;
        prmt.b32 choice, one, one, codes;
        and.b32 codes, codes, 0x7777;
        mov.b32 one, 0x{_four_bytes(0):08X};
        mov.b32 two, 0x{_four_bytes(4):08X};
        prmt.b32 low, one, two, codes;
        mov.b32 one, 0x{_four_bytes(8):08X};
        mov.b32 two, 0x{_four_bytes(12):08X};
        prmt.b32 high, one, two, codes;
        lop3.b32 low, low, high, choice, 0xd8;
        and.b32 codes, choice, 0x01010101;
        shl.b32 codes, codes, 7;
        lop3.b32 ${word}, low, 0x7f7f7f7f, codes, 0xea;
        """
        for word in range(2)
    )
    + "}"
)


@gluon.constexpr_function
def program_of(kind, part):
    """The instructions for two neighbouring columns of part `part`."""
    if is_int4(kind):
        return _less_zero_point(part)
    if kind == "Q4_K":
        return _affine_in_place(part)
    if kind == "Q5_K":
        return _affine_from_two_words(part)
    if kind == "Q6_K":
        return _numbers_from_two_words(part)
    if kind == "Q4_0":
        return _numbers(part)
    if kind == "Q8_0":
        return _bytes(part)
    if kind == "IQ4_XS":
        return _looked_up(part)
    return _mxfp4(part) if kind == "MXFP4" else _nvfp4(part // 2)


@gluon.constexpr_function
def constraints_of(kind):
    """The registers of `program_of`: words of two columns, then scales or zero points that it applies."""
    words = 2 if kind in ("Q5_K", "Q6_K", "IQ4_XS") else 1
    scales = {"Q4_K": 4, "Q5_K": 4, "Q6_K": 0, "Q4_0": 0}.get(kind, 2)
    number = "r" if is_int4(kind) or kind in ("NVFP4", "MXFP4") else "f"
    return ",".join(["=&r", *["r"] * words, *[number] * scales])


@gluon.constexpr_function
def words_of_scales(kind, fields):
    """Words of 32 bits that hold the scales of a unit of a row."""
    return fields if is_int4(kind) else (fields + 1) // 2


@gluon.jit
def fields_of(weight_scale, row, n, FIELDS: gl.constexpr, KIND: gl.constexpr):
    """Where the scales of weight rows `row` [BN] begin, and the words from one load to the next."""
    if is_int4(KIND):
        return weight_scale + row, n
    else:
        return weight_scale + row // 16 * (8 * FIELDS), n // 2 * FIELDS


@gluon.jit
def load_fields(
    fields_at, row, step, first, last, COUNT: gl.constexpr, FIELDS: gl.constexpr, KIND: gl.constexpr
):
    """The words of the scales of units `first` to first + COUNT - 1, at most `last`.

    fields_at, step: as `fields_of` returns them. row [BN]: the row in its block of 16. A single number comes
    with its neighbour's.
    """
    fields = ()
    for index in gl.static_range(COUNT):
        unit = gl.minimum(first + index, last)
        if is_int4(KIND):
            for group in gl.static_range(FIELDS):
                fields += (gl.load(fields_at + (unit * FIELDS + group) * step),)
        else:
            for pair in gl.static_range(FIELDS // 2):
                fields += (gl.load(fields_at + unit * step + pair * 16 + row),)
            if FIELDS % 2 == 1:
                fields += (gl.load(fields_at + unit * step + FIELDS // 2 * 16 + row // 2),)
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
def load_codes(
    words, above, row, UNIT: gl.constexpr, WIDTH: gl.constexpr, KIND: gl.constexpr, left: gl.constexpr
):
    """The codes of unit UNIT of a chunk in registers: tiles [BN, WIDTH], and at last what codes have above
    four bits.

    words, above: in shared memory. row [BN]: the row in its block of 16.
    """
    if WIDTH == 32:
        codes = (words.slice(UNIT * 32, 32, 1).load(left),)
    else:
        codes = (
            words.slice(UNIT * 32, 16, 1).load(left),
            words.slice(UNIT * 32 + 16, 16, 1).load(left),
        )
    if KIND == "Q8_0":
        codes += (above.slice(UNIT * 32, 32, 1).load(left),)
    elif KIND == "Q6_K":
        codes += (above.slice(UNIT * 16, 16, 1).load(left),)
    elif KIND == "Q5_K":
        both = above.slice(UNIT * 16, 16, 1).load(left)
        codes += (own_bits(both, spread(row % 2 * 4, both)),)
    elif KIND == "IQ4_XS":
        codes = (numbers_of(codes[0]),)
    return codes


@gluon.jit
def own_bits(words, shift):
    """The low or the high four bits of bytes, by their shift, in the low ones; others in the high ones."""
    return gl.inline_asm_elementwise(
        "shr.u32 $0, $1, $2;", "=r,r,r,r", [words, shift], dtype=gl.int16, is_pure=True, pack=2
    )


@gluon.jit
def numbers_of(words):
    """The numbers of a word's four codes of IQ4_XS, each more by 128, as the bytes of an int32."""
    return gl.inline_asm_elementwise(IQ4_BYTES, "=&r,=&r,r", [words], dtype=gl.int32, is_pure=True, pack=2)


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


@gluon.constexpr_function
def fp4_scale_program(kind, index):
    """The scale in byte `index` of a word as bfloat16, in both halves of a register (MXFP4), or 2^110 times
    the scales in bytes `index` and `index` + 2, one in each half (NVFP4). None is negative."""
    if kind == "MXFP4":
        return (
            f"{{\n.reg .b32 zero;\nmov.b32 zero, 0;\nprmt.b32 $0, $1, zero, 0x{index}4{index}4;\n"
            "shr.u32 $0, $0, 1;\n}"
        )
    return f"""
        {{
        .reg .b32 zero, both, factor;
        {_moved("both", "$1", -4 if index else 4)}
        and.b32 both, both, 0x07F007F0;
        mov.b32 factor, 0x7b807b80;
        mov.b32 zero, 0x80008000;
        fma.rn.bf16x2 both, both, factor, zero;
        mov.b32 factor, 0x76807680;
        fma.rn.bf16x2 $0, both, factor, zero;
        }}
        """


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
def decode_part(codes, fields, PART: gl.constexpr, WIDTH: gl.constexpr, KIND: gl.constexpr):
    """Part PART of a unit, WIDTH neighbouring columns, as bfloat16 [BN, WIDTH]: values, or the numbers of
    codes where the kind scales sums.

    codes: as `load_codes` returns them. fields: the words of the unit's scales, each [BN] int32.
    """
    SLICE: gl.constexpr = PART * WIDTH // 32
    HALF: gl.constexpr = PART * WIDTH % 32 // 16
    if KIND == "Q8_0":
        words = codes[SLICE // 2]
    else:
        words = codes[HALF]
    if is_int4(KIND):
        inputs = (words, spread(minus_zero_point(fields[SLICE * len(fields) // 4]), words))
    elif KIND == "Q4_0":
        inputs = (words,)
    elif KIND == "Q6_K":
        inputs = (words, codes[2])
    elif KIND == "NVFP4" or KIND == "MXFP4":
        inputs = (words, spread(fp4_scale(fields, SLICE, HALF, KIND), words))
    elif is_affine(KIND):
        s, o = affine_of(fields, SLICE, KIND)
        s, o = spread(s, words), spread(o, words)
        inputs = (words, s, o) if KIND == "Q4_K" else (words, codes[2], s, o)
    else:
        inputs = (words, spread(scale_of(fields, SLICE, HALF, KIND), words))
    return gl.inline_asm_elementwise(
        program_of(KIND, PART), constraints_of(KIND), inputs, dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def finish(
    total, weight_scale, tile, n, all_units, layout: gl.constexpr, BN: gl.constexpr, FIELDS: gl.constexpr,
    KIND: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """total [BN, BM] times what decoded values lack: a power of two, or the factor of each weight row, which
    lies in the unit of scales behind the last."""
    if KIND == "NVFP4":
        row = weight_row(tile, n, gl.arange(0, BN, gl.SliceLayout(1, layout)), BN, GATED)
        at = weight_scale + row // 16 * (8 * FIELDS) + row % 16 + all_units * (n // 2 * FIELDS)
        factor = as_float(gl.load(at)) * 65536.0
        return gl.fma(total, spread(factor, total), gl.zeros([BN, total.shape[1]], gl.float32, layout))
    elif is_affine(KIND):
        return total * 281474976710656.0
    elif is_int4(KIND) or KIND == "Q6_K":
        return total * 64.0
    else:
        return total
