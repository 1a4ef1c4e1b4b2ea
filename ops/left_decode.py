"""Decodes parts of units of packed codes in the registers of a tensor core's left operand.

A kind is a name in ops.blocks.KINDS, or INT4 or INT4_BF16: codes of ops.int4 with scales in float16 or
bfloat16. Two neighbouring columns share a register. Kinds that scale sums give the exact numbers q of their
codes, less their zero points. The others give values, one float32 number s * q + o rounded once to bfloat16.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from compiled_mtp.ops.left_assembly import IQ4_BYTES, constraints_of, is_affine, is_int4, program_of
from compiled_mtp.ops.left_operand import as_float, spread, weight_row


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
def decode_part(codes, scales, PART: gl.constexpr, WIDTH: gl.constexpr, KIND: gl.constexpr):
    """Part PART of a unit, WIDTH neighbouring columns, as bfloat16 [BN, WIDTH]: values, or the numbers of
    codes where the kind scales sums.

    codes: as `load_codes` returns them. scales: as `value_scales` has them for the part's columns.
    """
    if KIND == "Q8_0":
        words = codes[PART * WIDTH // 64]
    else:
        words = codes[PART * WIDTH % 32 // 16]
    inputs = (words,)
    if KIND == "Q5_K" or KIND == "Q6_K":
        inputs += (codes[2],)
    for index in gl.static_range(len(scales)):
        inputs += (spread(scales[index], words),)
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
