"""The four-bit product with decoded weight rows as the left operand (ops.left_operand).

`w4a16_kernel` pads rows to 16, and spends twice the instructions of this kernel on one or two requests. A
warp decodes one or two blocks of 16 weight rows. The order of sums, and so the bits, are those of
`w4a16_kernel`.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_mtp.ops.device import device_of
from compiled_mtp.ops.int4 import UNIT
from compiled_mtp.ops.left_operand import (
    copy_layout,
    copy_rows,
    copy_words,
    memory_layout,
    spread,
    store_tile,
    weight_row,
)
from compiled_mtp.ops.linear_w4a16.config import FewRowsTile

OPTIONS = {"enable_fp_fusion": True}
# Of each bit field: two words shifted, masked and put into 128, and the zero points subtracted.
DECODE = gl.constexpr(
    tuple(
        f"""
        {{
        .reg .b32 field, one;
        mov.b32 one, 0x3f803f80;
        shr.u32 field, $1, {shift};
        lop3.b32 field, field, 0x000f000f, 0x43004300, 0xea;
        fma.rn.bf16x2 $0, field, one, $2;
        }}
        """
        for shift in (0, 4, 8, 12)
    )
)


@gluon.jit
def decode(words, minus, SLICE: gl.constexpr):
    """Bit field SLICE of words [BN, 32] int16 as exact bfloat16 q - z, with minus [BN, 32] = -(128 + z).

    A code in the last bits of bfloat16's 128 is 128 + q. Two words share a register.
    """
    return gl.inline_asm_elementwise(
        DECODE[SLICE], "=&r,r,r", [words, minus], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def scale_of(group, IS_BF16: gl.constexpr):
    """The float32 scale in the low half of a group's word."""
    if IS_BF16:
        return (group << 16).to(gl.float32, bitcast=True)
    else:
        return (group & 0xFFFF).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)


@gluon.jit
def minus_of(group):
    """The bfloat16 number -(128 + z) in the high half of a group's word."""
    return (group >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True)


@gluon.jit
def load_groups(group_at, n, first, last, COUNT: gl.constexpr):
    """The words of groups `first` to first + COUNT - 1, at most `last`, of the tile's weight rows."""
    groups = ()
    for index in gl.static_range(COUNT):
        groups += (gl.load(group_at + gl.minimum(first + index, last) * n),)
    return groups


@gluon.jit
def add_unit(
    words, x, groups, total, layout: gl.constexpr, UNIT: gl.constexpr, PER_UNIT: gl.constexpr,
    IS_BF16: gl.constexpr,
):  # fmt: skip
    """total [BN, BM] plus the products of unit UNIT of a chunk in shared memory, group by group.

    groups: those of the unit.
    """
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, layout, 2)
    own = words.slice(UNIT * 32, 32, 1).load(left)
    for group in gl.static_range(PER_UNIT):
        product = gl.zeros([total.shape[0], total.shape[1]], gl.float32, layout)
        minus = spread(minus_of(groups[group]), own)
        for index in gl.static_range(group * (4 // PER_UNIT), (group + 1) * (4 // PER_UNIT)):
            columns = x.slice(UNIT * 128 + index * 32, 32, 1).permute([1, 0]).load(right)
            product = mma_v2(decode(own, minus, index), columns, product, input_precision="ieee")
        scale = gl.convert_layout(
            scale_of(groups[group], IS_BF16), gl.SliceLayout(1, layout), assert_trivial=True
        )
        total = gl.fma(product, spread(scale, total), total)
    return total


@gluon.jit
def sum_units(
    words, x, words_at, x_at, is_row, group_at, n, first, units, groups, total,
    layout: gl.constexpr, words_layout: gl.constexpr, rows_layout: gl.constexpr,
    PER_UNIT: gl.constexpr, CHUNK: gl.constexpr, STAGES: gl.constexpr, EVEN: gl.constexpr,
    IS_BF16: gl.constexpr,
):  # fmt: skip
    """Add `units` units from `first` on to total, chunk by chunk.

    The first STAGES - 1 chunks are on their way to shared memory; groups: those of the first chunk.
    """
    GROUPS: gl.constexpr = CHUNK * PER_UNIT
    end = first + units
    last_group = end * PER_UNIT - 1
    stage = 0
    for begin in range(0, units, CHUNK):
        next_groups = load_groups(group_at, n, (first + begin + CHUNK) * PER_UNIT, last_group, GROUPS)
        async_copy.wait_group(STAGES - 2)
        own_words = words.index(stage)
        own_x = x.index(stage)
        for unit in gl.static_range(CHUNK):
            own_groups = groups[unit * PER_UNIT : (unit + 1) * PER_UNIT]
            if EVEN or unit == 0:
                total = add_unit(own_words, own_x, own_groups, total, layout, unit, PER_UNIT, IS_BF16)
            else:
                if begin + unit < units:
                    total = add_unit(own_words, own_x, own_groups, total, layout, unit, PER_UNIT, IS_BF16)
        # The stage of the chunk before this one, which all warps have left.
        free = (stage + STAGES - 1) % STAGES
        next_first = first + begin + (STAGES - 1) * CHUNK
        copy_words(words.index(free), words_at, next_first, end, words_layout, 32, 512)
        copy_rows(x.index(free), x_at, is_row, next_first, end, rows_layout)
        stage = (stage + 1) % STAGES
        groups = next_groups
    return total


# Triton would compile other kernels for a value of 1 and for multiples of 16.
@gluon.jit(do_not_specialize=["rows", "n", "units"])
def w4a16_few_rows_kernel(
    x, weight, weight_scale, out, rows, n, x_stride, weight_stride, units,
    BM: gl.constexpr, BN: gl.constexpr, CHUNK: gl.constexpr, STAGES: gl.constexpr, EVEN: gl.constexpr,
    PER_UNIT: gl.constexpr, IS_BF16: gl.constexpr, GATED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """BM rows by a tile of BN weight rows, over one K split of `units` units.

    weight_scale: the groups' words of 32 bits. EVEN: `units` is a multiple of CHUNK. GATED: the tile's upper
    half are rows of the gate, its lower half those of up.
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [gl.num_warps(), 1], [16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    words_layout: gl.constexpr = copy_layout(CHUNK * 32, gl.num_warps())
    rows_layout: gl.constexpr = copy_layout(CHUNK * 128, gl.num_warps())
    # Row tiles of one weight tile are neighbours, so that all but the first find it in L2.
    row_tiles = (rows + BM - 1) // BM
    tile = gl.program_id(0) // row_tiles
    first_row = gl.program_id(0) % row_tiles * BM
    partial = gl.program_id(1)
    first = partial * units
    end = first + units
    words = gl.allocate_shared_memory(gl.int16, [STAGES, BN, CHUNK * 32], memory_layout(CHUNK * 32))
    shared_x = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BM, CHUNK * 128], memory_layout(CHUNK * 128))
    row = weight_row(tile, n, gl.arange(0, BN, gl.SliceLayout(1, words_layout)), BN, GATED)
    word = gl.arange(0, CHUNK * 32, gl.SliceLayout(0, words_layout))
    words_at = weight + ((row // 16).to(gl.int64) * (16 * weight_stride) + row % 16 * 32)[:, None]
    words_at += (word // 32 * 512 + word % 32)[None, :]
    for chunk in gl.static_range(STAGES - 1):
        copy_words(words.index(chunk), words_at, first + chunk * CHUNK, end, words_layout, 32, 512)
    group_at = weight_scale + weight_row(tile, n, gl.arange(0, BN, gl.SliceLayout(1, left)), BN, GATED)
    own = load_groups(group_at, n, first * PER_UNIT, end * PER_UNIT - 1, CHUNK * PER_UNIT)
    if PDL:
        gdc_wait()
        # The next kernel may come only now: measured for `linear`, two kernels that wait crowd a third.
        gdc_launch_dependents()
    row = first_row + gl.arange(0, BM, gl.SliceLayout(1, rows_layout))
    column = gl.arange(0, CHUNK * 128, gl.SliceLayout(0, rows_layout))
    x_at = x + row.to(gl.int64)[:, None] * x_stride + column[None, :]
    for chunk in gl.static_range(STAGES - 1):
        copy_rows(shared_x.index(chunk), x_at, row < rows, first + chunk * CHUNK, end, rows_layout)
    total = sum_units(
        words, shared_x, words_at, x_at, row < rows, group_at, n, first, units, own,
        gl.zeros([BN, BM], gl.float32, layout), layout, words_layout, rows_layout,
        PER_UNIT, CHUNK, STAGES, EVEN, IS_BF16,
    )  # fmt: skip
    async_copy.wait_group(0)
    store_tile(total, out, tile, first_row, partial, rows, n, layout, BN, BM, GATED)


def launch_few_rows(
    tile: FewRowsTile,
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    k_splits: int,
    dtype: torch.dtype,
    gated: bool = False,
) -> torch.Tensor:
    """[k_splits, M, N] of K in `k_splits` K splits, or [1, M, N / 2] where gated."""
    (rows, k), n = x.shape, weight.shape[0]
    out = torch.empty((k_splits, rows, n // 2 if gated else n), dtype=dtype, device=x.device)
    if rows == 0 or n == 0:
        return out
    has_pdl = device_of(x.device.index).has_dependent_launch
    units = k // UNIT
    w4a16_few_rows_kernel[(triton.cdiv(rows, tile.block_m) * triton.cdiv(n, tile.block_n), k_splits)](
        x,
        weight,
        weight_scale.view(torch.int32),
        out,
        rows,
        n,
        # One row may have any stride; another value would compile another kernel.
        x.stride(0) if rows > 1 else k,
        weight.stride(0),
        units // k_splits,
        BM=tile.block_m,
        BN=tile.block_n,
        CHUNK=tile.chunk,
        STAGES=tile.num_stages,
        EVEN=units // k_splits % tile.chunk == 0,
        PER_UNIT=weight_scale.shape[0] // units,
        IS_BF16=weight_scale.dtype == torch.bfloat16,
        GATED=gated,
        PDL=has_pdl,
        num_warps=tile.num_warps,
        launch_pdl=has_pdl,
        **OPTIONS,
    )
    return out
