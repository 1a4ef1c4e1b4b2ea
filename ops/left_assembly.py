"""The assembly with which `left_decode` decodes codes, and their scales where these are no float32 numbers.

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
def is_fp4(kind):
    """Whether codes are e2m1."""
    return kind in ("NVFP4", "MXFP4")


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
    number = "r" if is_int4(kind) or is_fp4(kind) else "f"
    return ",".join(["=&r", *["r"] * words, *[number] * scales])


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
