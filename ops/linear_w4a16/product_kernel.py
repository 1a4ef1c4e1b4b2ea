"""x @ weight.T with a four-bit weight, which is decoded in the registers that the tensor cores read.

A warp multiplies one or two blocks of 16 weight rows, the left operand, by all rows of a tile. It reads each
unit of 128 columns (ops.int4) straight into the registers of that operand, some units ahead: each bit field
of the 32 words is 32 neighbouring columns, decoded to exact q - z. The products of a group's columns are
summed in a tensor core from zero, multiplied by the scale in float32, and added to the total. That order
holds for every tile, so rows have the same bits in all of them.

The kernel is written in Gluon, because Triton moves a loaded operand through shared memory. Triton's
interpreter cannot run Gluon: on a CPU, tests run its Python with a stand-in (tests/ops/gluon_on_cpu.py).
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
from compiled_mtp.ops.linear_w4a16.config import W4A16Config, configuration

OPTIONS = {"enable_fp_fusion": True}
# Triton 3.9 renames the function.
async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

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
def load_unit(words_at, group_at, n, unit, PER_UNIT: gl.constexpr):
    """The words of one unit of the tile's weight rows, and the words of its groups."""
    words = gl.load(words_at + unit * 512, cache_modifier=".cg")
    groups = ()
    for group in gl.static_range(PER_UNIT):
        groups += (gl.load(group_at + (unit * PER_UNIT + group) * n),)
    return words, groups


@gluon.jit
def load_units(words_at, group_at, n, first, last, PER_UNIT: gl.constexpr, DEPTH: gl.constexpr):
    """Units first to first + DEPTH - 1, at most `last`: words and groups of each."""
    words = ()
    groups = ()
    for index in gl.static_range(DEPTH):
        own = load_unit(words_at, group_at, n, gl.minimum(first + index, last), PER_UNIT)
        words += (own[0],)
        groups += (own[1],)
    return words, groups


@gluon.jit
def spread(column, like):
    """A column [BN] as [BN, 32]."""
    return gl.expand_dims(column, 1).broadcast_to(like.shape)


@gluon.jit
def load_slices(x_at, unit):
    """The four slices [32, BM] of one unit's columns of the tile's rows."""
    at = x_at + unit * 128
    return gl.load(at), gl.load(at + 32), gl.load(at + 64), gl.load(at + 96)


@gluon.constexpr_function
def rows_operand(layout):
    """The layout of a slice [32, BM] of rows, of which a thread holds four neighbouring columns."""
    return gl.DotOperandLayout(1, layout, 4)


@gluon.jit
def slice_of(rows, index: gl.constexpr, layout: gl.constexpr, SHARED: gl.constexpr):
    """Slice `index` [32, BM] of a unit's rows: a tuple of four, or [BM, 128] in shared memory."""
    if SHARED:
        return rows.slice(index * 32, 32, 1).permute([1, 0]).load(rows_operand(layout))
    else:
        return rows[index]


@gluon.jit
def add_unit(
    x_rows, words, groups, total, PER_UNIT: gl.constexpr, IS_BF16: gl.constexpr, SHARED: gl.constexpr
):
    """total [BN, BM] plus the products of one unit's columns, group by group."""
    layout: gl.constexpr = total.type.layout
    for group in gl.static_range(PER_UNIT):
        product = gl.zeros([total.shape[0], total.shape[1]], gl.float32, layout)
        minus = spread(minus_of(groups[group]), words)
        for index in gl.static_range(group * (4 // PER_UNIT), (group + 1) * (4 // PER_UNIT)):
            values = decode(words, minus, index)
            product = mma_v2(values, slice_of(x_rows, index, layout, SHARED), product, input_precision="ieee")
        scale = gl.convert_layout(
            scale_of(groups[group], IS_BF16), gl.SliceLayout(1, layout), assert_trivial=True
        )
        total = gl.fma(product, spread(scale, total), total)
    return total


@gluon.jit
def sum_units(
    x_at, words_at, group_at, n, first, units, words, groups, total,
    PER_UNIT: gl.constexpr, DEPTH: gl.constexpr, IS_BF16: gl.constexpr,
):  # fmt: skip
    """Sum `units` units from `first` on with rows from L1; words, groups: the first DEPTH units'."""
    last = first + units - 1
    whole = units // DEPTH * DEPTH
    for base in range(0, whole, DEPTH):
        next_words = ()
        next_groups = ()
        for index in gl.static_range(DEPTH):
            unit = first + base + index
            slices = load_slices(x_at, unit)
            total = add_unit(slices, words[index], groups[index], total, PER_UNIT, IS_BF16, False)
            own = load_unit(words_at, group_at, n, gl.minimum(unit + DEPTH, last), PER_UNIT)
            next_words += (own[0],)
            next_groups += (own[1],)
        words = next_words
        groups = next_groups
    for index in gl.static_range(DEPTH - 1):
        if whole + index < units:
            slices = load_slices(x_at, first + whole + index)
            total = add_unit(slices, words[index], groups[index], total, PER_UNIT, IS_BF16, False)
    return total


@gluon.jit
def copy_unit(shared, x_at, unit):
    """Copy one unit's columns of the tile's rows to shared memory."""
    async_load(shared, x_at + unit * 128)
    async_copy.commit_group()


@gluon.jit
def sum_units_shared(
    stages, x_at, words_at, group_at, n, first, units, words, groups, total,
    PER_UNIT: gl.constexpr, DEPTH: gl.constexpr, IS_BF16: gl.constexpr,
):  # fmt: skip
    """As `sum_units`, with rows from shared memory: DEPTH stages [BM, 128], which the warps share."""
    last = first + units - 1
    whole = units // DEPTH * DEPTH
    for index in gl.static_range(DEPTH - 1):
        copy_unit(stages[index], x_at, gl.minimum(first + index, last))
    for base in range(0, whole, DEPTH):
        next_words = ()
        next_groups = ()
        for index in gl.static_range(DEPTH):
            unit = first + base + index
            async_copy.wait_group(DEPTH - 2)
            # Other warps may still read the stage that the next copy fills until all have come here.
            gl.thread_barrier()
            copy_unit(stages[(index + DEPTH - 1) % DEPTH], x_at, gl.minimum(unit + DEPTH - 1, last))
            total = add_unit(stages[index], words[index], groups[index], total, PER_UNIT, IS_BF16, True)
            own = load_unit(words_at, group_at, n, gl.minimum(unit + DEPTH, last), PER_UNIT)
            next_words += (own[0],)
            next_groups += (own[1],)
        words = next_words
        groups = next_groups
    # The copies of the rest are on their way: at most DEPTH - 1 units.
    async_copy.wait_group(0)
    gl.thread_barrier()
    for index in gl.static_range(DEPTH - 1):
        if whole + index < units:
            total = add_unit(stages[index], words[index], groups[index], total, PER_UNIT, IS_BF16, True)
    # The next K split fills the stages again.
    gl.thread_barrier()
    return total


@gluon.jit
def sum_k_splits(
    stages, x_at, words_at, group_at, n, first, units, words, groups, zero,
    PER_UNIT: gl.constexpr, DEPTH: gl.constexpr, IS_BF16: gl.constexpr, COUNT: gl.constexpr,
    SHARED: gl.constexpr,
):  # fmt: skip
    """The sums of COUNT neighbouring K splits of `units` units from unit `first` on, added as a tree."""
    if COUNT == 1:
        if SHARED:
            return sum_units_shared(
                stages, x_at, words_at, group_at, n, first, units, words, groups, zero,
                PER_UNIT, DEPTH, IS_BF16,
            )  # fmt: skip
        else:
            return sum_units(
                x_at, words_at, group_at, n, first, units, words, groups, zero,
                PER_UNIT, DEPTH, IS_BF16,
            )  # fmt: skip
    else:
        left = sum_k_splits(
            stages, x_at, words_at, group_at, n, first, units, words, groups, zero,
            PER_UNIT, DEPTH, IS_BF16, COUNT // 2, SHARED,
        )  # fmt: skip
        middle = first + COUNT // 2 * units
        own = load_units(words_at, group_at, n, middle, middle + units - 1, PER_UNIT, DEPTH)
        right = sum_k_splits(
            stages, x_at, words_at, group_at, n, middle, units, own[0], own[1], zero,
            PER_UNIT, DEPTH, IS_BF16, COUNT // 2, SHARED,
        )  # fmt: skip
        return left + right


@gluon.jit
def halves_of(tile):
    """The upper and the lower half of [BN, BM], which one thread holds both of."""
    BN: gl.constexpr = tile.shape[0]
    BM: gl.constexpr = tile.shape[1]
    return gl.split(gl.permute(gl.reshape(tile, [2, BN // 2, BM]), [1, 2, 0]))


@gluon.constexpr_function
def rows_layout(num_warps):
    """A layout of [BM, 128] whose threads copy eight columns each."""
    return gl.BlockedLayout([1, 8], [2, 16], [num_warps, 1], [1, 0])


# Triton would compile other kernels for a value of 1 and for multiples of 16.
@gluon.jit(do_not_specialize=["rows", "n", "units"])
def w4a16_kernel(
    x, weight, groups, out, rows, n, x_stride, weight_stride, units,
    BM: gl.constexpr, BN: gl.constexpr, DEPTH: gl.constexpr, PER_UNIT: gl.constexpr,
    IS_BF16: gl.constexpr, K_SPLITS: gl.constexpr, GATED: gl.constexpr, SHARED: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """One tile [BN weight rows, BM rows] over K_SPLITS neighbouring K splits of `units` units.

    groups: the groups' words of 32 bits. GATED: the tile's upper half are the gate's rows, its lower half
    those of up.
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [gl.num_warps(), 1], [16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 4)
    right: gl.constexpr = gl.DotOperandLayout(1, layout, 4)
    # Row tiles of one weight tile are neighbours, so that all except the first find it in L2.
    row_tiles = (rows + BM - 1) // BM
    tile = gl.program_id(0)
    first_row = tile % row_tiles * BM
    tile = tile // row_tiles
    partial = gl.program_id(1)
    first_unit = partial * (K_SPLITS * units)
    in_tile = gl.arange(0, BN, gl.SliceLayout(1, left))
    # Blocks of 16 weight rows; those beyond N read the last one, and are never stored.
    if GATED:
        blocks = n // 32
        block = gl.minimum(tile * (BN // 32) + in_tile // 16 % (BN // 32), blocks - 1)
        block += in_tile // 16 // (BN // 32) * blocks
    else:
        block = gl.minimum(tile * (BN // 16) + in_tile // 16, n // 16 - 1)
    word = gl.arange(0, 32, gl.SliceLayout(0, left))
    words_at = weight + (block.to(gl.int64) * (16 * weight_stride) + in_tile % 16 * 16)[:, None]
    words_at += (word // 16 * 256 + word % 16)[None, :]
    group_at = groups + (block * 16 + in_tile % 16)
    first = load_units(words_at, group_at, n, first_unit, first_unit + units - 1, PER_UNIT, DEPTH)
    if PDL:
        gdc_wait()
        # The next kernel may come only now: measured for `linear`, two kernels that wait crowd a third.
        gdc_launch_dependents()
    # Rows beyond the last one read the last one, and are never stored.
    stages = ()
    if SHARED:
        from_layout: gl.constexpr = rows_layout(gl.num_warps())
        # Eight rows read 32 bytes each at a time, from different banks.
        shared_layout: gl.constexpr = gl.SwizzledSharedLayout(16, 1, 4, [1, 0])
        for _ in gl.static_range(DEPTH):
            stages += (gl.allocate_shared_memory(gl.bfloat16, [BM, 128], shared_layout),)
        row = gl.minimum(first_row + gl.arange(0, BM, gl.SliceLayout(1, from_layout)), rows - 1)
        column = gl.arange(0, 128, gl.SliceLayout(0, from_layout))
        x_at = x + row.to(gl.int64)[:, None] * x_stride + column[None, :]
    else:
        row = gl.minimum(first_row + gl.arange(0, BM, gl.SliceLayout(0, right)), rows - 1)
        column = gl.arange(0, 32, gl.SliceLayout(1, right))
        x_at = x + row.to(gl.int64)[None, :] * x_stride + column[:, None]
    total = sum_k_splits(
        stages, x_at, words_at, group_at, n, first_unit, units, first[0], first[1],
        gl.zeros([BN, BM], gl.float32, layout), PER_UNIT, DEPTH, IS_BF16, K_SPLITS, SHARED,
    )  # fmt: skip
    to_row = first_row + gl.arange(0, BM, gl.SliceLayout(0, layout))
    dtype: gl.constexpr = out.dtype.element_ty
    in_tile = gl.arange(0, BN, gl.SliceLayout(1, layout))
    if GATED:
        width = n // 2
        column = tile * (BN // 2) + in_tile % (BN // 2)
    else:
        width = n
        column = tile * BN + in_tile
    to = out + (partial.to(gl.int64) * rows + to_row.to(gl.int64))[None, :] * width + column[:, None]
    is_stored = (to_row < rows)[None, :] & (column < width)[:, None]
    if GATED:
        # Rounded as silu_mul does it on the rounded sums.
        gate, up = halves_of(total.to(dtype).to(gl.float32))
        total = gate / (1.0 + gl.exp(-gate)) * up
        to, _ = halves_of(to)
        is_stored, _ = halves_of(is_stored.to(gl.int8))
        is_stored = is_stored != 0
    gl.store(to, total.to(dtype), mask=is_stored)


def launch_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    split: int,
    k_splits: int,
    dtype: torch.dtype,
    gated: bool = False,
) -> torch.Tensor:
    """[split, M, N] of K in `k_splits` K splits, or [1, M, N / 2] where gated."""
    config = configuration(x.shape[0], weight.shape[0], split, gated)
    return launch_config(config, x, weight, weight_scale, split, k_splits, dtype, gated)


def launch_config(
    config: W4A16Config,
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    split: int,
    k_splits: int,
    dtype: torch.dtype,
    gated: bool = False,
) -> torch.Tensor:
    """The product with a configuration given, as the tuner does."""
    (rows, k), n = x.shape, weight.shape[0]
    out = torch.empty((split, rows, n // 2 if gated else n), dtype=dtype, device=x.device)
    if rows == 0 or n == 0:
        return out
    has_pdl = device_of(x.device.index).has_dependent_launch
    units = k // UNIT
    w4a16_kernel[(triton.cdiv(rows, config.block_m) * triton.cdiv(n, config.block_n), split)](
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
        BM=config.block_m,
        BN=config.block_n,
        DEPTH=config.depth,
        PER_UNIT=weight_scale.shape[0] // units,
        IS_BF16=weight_scale.dtype == torch.bfloat16,
        K_SPLITS=k_splits // split,
        GATED=gated,
        SHARED=config.is_shared,
        PDL=has_pdl,
        num_warps=config.num_warps,
        launch_pdl=has_pdl,
        **OPTIONS,
    )
    return out
