"""Decodes units of four-bit weights (ops.int4) to exact q - z in bfloat16."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def decode(words, minus_0, minus_1, minus_2, minus_3, ON_DEVICE: tl.constexpr):
    """The four bit fields of words [32, BN] int16 as exact bfloat16 q - z.

    minus_0 .. minus_3 [32, BN]: the number -(128 + z) of each field. A code in the last bits of bfloat16's
    128 is 128 + q. Two words share a register.
    """
    if ON_DEVICE:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 second, third, fourth, one;
            mov.b32 one, 0x3f803f80;
            shr.u32 second, $4, 4;
            shr.u32 third, $4, 8;
            shr.u32 fourth, $4, 12;
            lop3.b32 $0, $4, 0x000f000f, 0x43004300, 0xea;
            lop3.b32 $1, second, 0x000f000f, 0x43004300, 0xea;
            lop3.b32 $2, third, 0x000f000f, 0x43004300, 0xea;
            lop3.b32 $3, fourth, 0x000f000f, 0x43004300, 0xea;
            fma.rn.bf16x2 $0, $0, one, $5;
            fma.rn.bf16x2 $1, $1, one, $6;
            fma.rn.bf16x2 $2, $2, one, $7;
            fma.rn.bf16x2 $3, $3, one, $8;
            }
            """,
            "=&r,=&r,=&r,=&r,r,r,r,r,r",
            [words, minus_0, minus_1, minus_2, minus_3],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        return (
            ((words & 15).to(tl.float32) + (minus_0.to(tl.float32) + 128.0)).to(tl.bfloat16),
            (((words >> 4) & 15).to(tl.float32) + (minus_1.to(tl.float32) + 128.0)).to(tl.bfloat16),
            (((words >> 8) & 15).to(tl.float32) + (minus_2.to(tl.float32) + 128.0)).to(tl.bfloat16),
            (((words >> 12) & 15).to(tl.float32) + (minus_3.to(tl.float32) + 128.0)).to(tl.bfloat16),
        )


@triton.jit
def scale_of(group, SCALE: tl.constexpr):
    """The float32 scale in the low half of a group's word; SCALE: its dtype."""
    if tl.bfloat16 == SCALE:
        return (group << 16).to(tl.float32, bitcast=True)
    else:
        return (group & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def minus_of(group, words):
    """The bfloat16 number -(128 + z) in the high half of a group's word, for every word of its columns."""
    minus = (group >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.broadcast_to(minus[None, :], words.shape)
