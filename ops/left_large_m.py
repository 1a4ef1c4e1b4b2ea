"""The product of `left_product` for many rows, on Hopper: warps that load, and warp groups that multiply.

Each warp group decodes 64 weight rows in registers, the left operand of `wgmma`; all rows of a tile are the
right one, in shared memory. While one group decodes, the tensor cores work for another. The order of sums,
and so the bits, are those of `left_kernel`: a warp group's instruction adds the products of 16 columns to a
sum like the instruction of a single warp.

The kernel is written in Gluon; on a CPU, tests run its Python with a stand-in (tests/ops/gluon_on_cpu.py).
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_mtp.ops.device import device_of
from compiled_mtp.ops.left_config import GROUP_ROWS, LargeMTile
from compiled_mtp.ops.left_decode import (
    decode_part,
    fields_of,
    finish,
    load_codes,
    load_fields,
    own_fields,
    scale_of,
    words_of_scales,
)
from compiled_mtp.ops.left_operand import (
    LeftWeight,
    async_load,
    copy_layout,
    memory_layout,
    spread,
    store_tile,
    weight_row,
    words_above,
    words_of_rows,
)

OPTIONS = {"enable_fp_fusion": True}
UNIT = 128
# Triton 3.9 renames the function.
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.jit
def copy_unit(
    words, above, words_at, above_at, stage, unit, GROUPS: gl.constexpr, ABOVE: gl.constexpr,
    BLOCK_WORDS: gl.constexpr,
):  # fmt: skip
    """Copy one unit of each group's weight rows to a stage."""
    for group in gl.static_range(GROUPS):
        async_load(words.index(stage * GROUPS + group), words_at[group] + unit * BLOCK_WORDS)
        if ABOVE > 0:
            async_load(above.index(stage * GROUPS + group), above_at[group] + unit * BLOCK_WORDS)


@gluon.jit
def load_units(
    sources,
    BM: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, KIND: gl.constexpr, ABOVE: gl.constexpr,
    BLOCK_WORDS: gl.constexpr, GATED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Copy the units of the rows and of the weight to shared memory, one to a stage.

    sources: as `left_large_m_kernel` has them. A stage's barrier in `full` completes when its copies have
    arrived, that in `empty` when all groups have read it.
    """
    x, weight, words, above, shared_x, full, empty, first_row, tile, n, weight_stride, first, units = sources
    words_layout: gl.constexpr = copy_layout(32, 4)
    above_layout: gl.constexpr = copy_layout(ABOVE if ABOVE > 0 else 32, 4)
    words_at = ()
    above_at = ()
    for group in gl.static_range(GROUPS):
        own_tile = tile * GROUPS + group
        row = weight_row(own_tile, n, gl.arange(0, 64, gl.SliceLayout(1, words_layout)), 64, GATED)
        word = gl.arange(0, 32, gl.SliceLayout(0, words_layout))
        words_at += (words_of_rows(weight, row, weight_stride, word, 32, BLOCK_WORDS),)
        if ABOVE > 0:
            row = weight_row(own_tile, n, gl.arange(0, 64, gl.SliceLayout(1, above_layout)), 64, GATED)
            word = gl.arange(0, ABOVE, gl.SliceLayout(0, above_layout))
            above_at += (words_above(weight, row, weight_stride, word, ABOVE, BLOCK_WORDS, KIND),)
    for early in gl.static_range(STAGES):
        if early < units:
            copy_unit(words, above, words_at, above_at, early, first + early, GROUPS, ABOVE, BLOCK_WORDS)
            async_copy.mbarrier_arrive(full.index(early), increment_count=False)
    if PDL:
        gdc_wait()
        # The next kernel may come only now: measured for `linear`, two kernels that wait crowd a third.
        gdc_launch_dependents()
    for early in gl.static_range(STAGES):
        if early < units:
            mbarrier.expect(full.index(early), BM * 256)
            load_tile(x, [first_row, (first + early) * 128], full.index(early), shared_x.index(early))
    stage = 0
    phase = 0
    for unit in range(STAGES, units):
        mbarrier.wait(empty.index(stage), phase)
        mbarrier.expect(full.index(stage), BM * 256)
        load_tile(x, [first_row, (first + unit) * 128], full.index(stage), shared_x.index(stage))
        copy_unit(words, above, words_at, above_at, stage, first + unit, GROUPS, ABOVE, BLOCK_WORDS)
        async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
        stage = stage + 1
        if stage == STAGES:
            stage = 0
            phase = phase ^ 1


@gluon.jit
def add_unit(
    words, above, x, fields, row, total, layout: gl.constexpr, WIDTH: gl.constexpr, FIELDS: gl.constexpr,
    KIND: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """total [64, BM] plus the products of one unit, part by part."""
    BM: gl.constexpr = x.shape[0]
    COUNT: gl.constexpr = 128 // WIDTH
    codes = load_codes(words, above, row, 0, WIDTH, KIND, gl.DotOperandLayout(0, layout, 2))
    fields = own_fields(fields, row, FIELDS, KIND)
    sums = total
    waiting = total
    for part in gl.static_range(COUNT):
        columns = x.slice(part * WIDTH, WIDTH, 1).permute([1, 0])
        decoded = decode_part(codes, fields, part, WIDTH, KIND)
        if PARTS == 0:
            sums = warpgroup_mma(decoded, columns, sums, is_async=True)
        else:
            if part % PARTS == 0:
                sums = gl.zeros([64, BM], gl.float32, layout)
            sums = warpgroup_mma(decoded, columns, sums, use_acc=part % PARTS > 0, is_async=True)
            if part % PARTS == PARTS - 1:
                # The sums of one scale are on their way while those of the scale before it are added.
                if part >= PARTS:
                    waiting = warpgroup_mma_wait(PARTS, deps=[waiting])
                    total = add_scaled(waiting, fields, total, part - PARTS, layout, WIDTH, KIND)
                waiting = sums
    if PARTS == 0:
        total = warpgroup_mma_wait(0, deps=[sums])
    else:
        waiting = warpgroup_mma_wait(0, deps=[waiting])
        total = add_scaled(waiting, fields, total, COUNT - 1, layout, WIDTH, KIND)
    return total


@gluon.jit
def add_scaled(
    sums, fields, total, PART: gl.constexpr, layout: gl.constexpr, WIDTH: gl.constexpr, KIND: gl.constexpr
):
    """total plus the sums of the columns of one scale, part PART among them, times that scale."""
    scale = scale_of(fields, PART * WIDTH // 32, PART * WIDTH % 32 // 16, KIND)
    scale = gl.convert_layout(scale, gl.SliceLayout(1, layout), assert_trivial=True)
    return gl.fma(sums, spread(scale, total), total)


@gluon.jit
def multiply_units(
    given, GROUP: gl.constexpr, BM: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
    AHEAD: gl.constexpr, KIND: gl.constexpr, WIDTH: gl.constexpr, FIELDS: gl.constexpr, PARTS: gl.constexpr,
    GATED: gl.constexpr,
):  # fmt: skip
    """Multiply BM rows by the 64 weight rows of group GROUP, unit after unit.

    given: as `left_large_m_kernel` has it.
    """
    (
        weight_scale, out, words, above, shared_x, full, empty, first_row, tile, partial, rows, n, first,
        units, all_units,
    ) = given  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    own_tile = tile * GROUPS + GROUP
    row = weight_row(own_tile, n, gl.arange(0, 64, gl.SliceLayout(1, left)), 64, GATED)
    fields_at, step = fields_of(weight_scale, row, n, FIELDS, KIND)
    in_block = row % 16
    end = first + units
    PER_UNIT: gl.constexpr = words_of_scales(KIND, FIELDS)
    fields = load_fields(fields_at, in_block, step, first, end - 1, AHEAD, FIELDS, KIND)
    total = gl.zeros([64, BM], gl.float32, layout)
    stage = 0
    phase = 0
    for unit in range(units):
        fields += load_fields(fields_at, in_block, step, first + unit + AHEAD, end - 1, 1, FIELDS, KIND)
        mbarrier.wait(full.index(stage), phase)
        own = words.index(stage * GROUPS + GROUP)
        own_above = above.index(stage * GROUPS + GROUP)
        own_x = shared_x.index(stage)
        unit_fields = fields[:PER_UNIT]
        total = add_unit(
            own, own_above, own_x, unit_fields, in_block, total, layout, WIDTH, FIELDS, KIND, PARTS
        )
        mbarrier.arrive(empty.index(stage), count=1)
        stage = stage + 1
        if stage == STAGES:
            stage = 0
            phase = phase ^ 1
        fields = fields[PER_UNIT:]
    total = finish(total, weight_scale, own_tile, n, all_units, layout, 64, FIELDS, KIND, GATED)
    store_tile(total, out, own_tile, first_row, partial, rows, n, layout, 64, BM, GATED)


# Triton would compile other kernels for a value of 1 and for multiples of 16.
@gluon.jit(do_not_specialize=["rows", "n", "units", "all_units"])
def left_large_m_kernel(
    x, weight, weight_scale, out, rows, n, weight_stride, units, all_units,
    BM: gl.constexpr, GROUPS: gl.constexpr, REGISTERS: gl.constexpr, STAGES: gl.constexpr,
    AHEAD: gl.constexpr, KIND: gl.constexpr, WIDTH: gl.constexpr, FIELDS: gl.constexpr, ABOVE: gl.constexpr,
    BLOCK_WORDS: gl.constexpr, PARTS: gl.constexpr, GATED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """BM rows by a tile of 64 GROUPS weight rows, over one K split of `units` units; GROUPS: 2, 3 or 5.

    x: a descriptor of tiles [BM, 128] of the rows. all_units: units of a whole row. weight_scale: words of 32
    bits. KIND to PARTS: the weight's LeftForm. GATED: as `weight_row` has it.
    """
    # Row tiles of one weight tile are neighbours, so that all but the first find it in L2.
    row_tiles = (rows + BM - 1) // BM
    tile = gl.program_id(0) // row_tiles
    first_row = gl.program_id(0) % row_tiles * BM
    partial = gl.program_id(1)
    first = partial * units
    words = gl.allocate_shared_memory(gl.int16, [STAGES * GROUPS, 64, 32], memory_layout(32))
    above = words
    if ABOVE > 0:
        above = gl.allocate_shared_memory(gl.int16, [STAGES * GROUPS, 64, ABOVE], memory_layout(ABOVE))
    shared_x = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BM, 128], x.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        # The threads that copy words, and the one that asks for rows.
        mbarrier.init(full.index(stage), count=129)
        mbarrier.init(empty.index(stage), count=GROUPS)
    given = (
        weight_scale, out, words, above, shared_x, full, empty, first_row, tile, partial, rows, n, first,
        units, all_units,
    )  # fmt: skip
    sources = (
        x, weight, words, above, shared_x, full, empty, first_row, tile, n, weight_stride, first, units
    )  # fmt: skip
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (multiply_units, (given, 0, BM, GROUPS, STAGES, AHEAD, KIND, WIDTH, FIELDS, PARTS, GATED)),
                (multiply_units, (given, 1, BM, GROUPS, STAGES, AHEAD, KIND, WIDTH, FIELDS, PARTS, GATED)),
                (load_units, (sources, BM, GROUPS, STAGES, KIND, ABOVE, BLOCK_WORDS, GATED, PDL)),
            ],
            [4, 4],
            [REGISTERS, 40],
        )
    elif GROUPS == 3:
        gl.warp_specialize(
            [
                (multiply_units, (given, 0, BM, GROUPS, STAGES, AHEAD, KIND, WIDTH, FIELDS, PARTS, GATED)),
                (multiply_units, (given, 1, BM, GROUPS, STAGES, AHEAD, KIND, WIDTH, FIELDS, PARTS, GATED)),
                (multiply_units, (given, 2, BM, GROUPS, STAGES, AHEAD, KIND, WIDTH, FIELDS, PARTS, GATED)),
                (load_units, (sources, BM, GROUPS, STAGES, KIND, ABOVE, BLOCK_WORDS, GATED, PDL)),
            ],
            [4, 4, 4],
            [REGISTERS, REGISTERS, 40],
        )
    else:
        gl.warp_specialize(
            [
                (multiply_units, (given, 0, BM, GROUPS, STAGES, AHEAD, KIND, WIDTH, FIELDS, PARTS, GATED)),
                (multiply_units, (given, 1, BM, GROUPS, STAGES, AHEAD, KIND, WIDTH, FIELDS, PARTS, GATED)),
                (multiply_units, (given, 2, BM, GROUPS, STAGES, AHEAD, KIND, WIDTH, FIELDS, PARTS, GATED)),
                (multiply_units, (given, 3, BM, GROUPS, STAGES, AHEAD, KIND, WIDTH, FIELDS, PARTS, GATED)),
                (multiply_units, (given, 4, BM, GROUPS, STAGES, AHEAD, KIND, WIDTH, FIELDS, PARTS, GATED)),
                (load_units, (sources, BM, GROUPS, STAGES, KIND, ABOVE, BLOCK_WORDS, GATED, PDL)),
            ],
            [4, 4, 4, 4, 4],
            [REGISTERS, REGISTERS, REGISTERS, REGISTERS, 40],
        )


def describe_rows(x: torch.Tensor, block_m: int) -> TensorDescriptor:
    """A descriptor of tiles of `block_m` rows and one unit, in the order in which tensor cores read them."""
    return TensorDescriptor.from_tensor(x, [block_m, UNIT], gl.NVMMASharedLayout(128, 16, 2))


def launch_left_large_m(
    tile: LargeMTile,
    x: torch.Tensor,
    weight: LeftWeight,
    k_splits: int,
    dtype: torch.dtype,
    gated: bool = False,
) -> torch.Tensor:
    """[k_splits, M, N] of K in `k_splits` K splits, or [1, M, N / 2] where gated.

    x must have a descriptor (ops.descriptors.is_describable).
    """
    (rows, k), n = x.shape, weight.words.shape[0]
    out = torch.empty((k_splits, rows, n // 2 if gated else n), dtype=dtype, device=x.device)
    has_pdl = device_of(x.device.index).has_dependent_launch
    units = k // UNIT
    weight_tiles = triton.cdiv(n, GROUP_ROWS * tile.groups)
    left_large_m_kernel[(triton.cdiv(rows, tile.block_m) * weight_tiles, k_splits)](
        describe_rows(x, tile.block_m),
        weight.words,
        weight.scales,
        out,
        rows,
        n,
        weight.words.stride(0),
        units // k_splits,
        units,
        BM=tile.block_m,
        GROUPS=tile.groups,
        REGISTERS=tile.registers,
        STAGES=tile.num_stages,
        AHEAD=tile.ahead,
        **weight.form.constants(),
        GATED=gated,
        PDL=has_pdl,
        num_warps=4,
        launch_pdl=has_pdl,
        **OPTIONS,
    )
    return out
