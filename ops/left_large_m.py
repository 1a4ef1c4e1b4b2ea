"""The product of `left_product` on Hopper, for many rows and, where `few_rows_tile` says so, for few: warps
that load, and warp groups that multiply.

Each warp group decodes 64 weight rows in registers, the left operand of `wgmma`; all rows of a tile are the
right one, in shared memory. While one group decodes, the tensor cores work for another, and for the units
before. The order of sums, and so the bits, are those of `left_kernel`: a warp group's instruction adds the
products of 16 columns to a sum like the instruction of a single warp.

A task is one K split of one tile of weight rows, for one tile of rows. Where there are more tasks than
processors, programs share them evenly, to a chunk of units; a task is then cut in two: a program hands the
float32 sums of the first units over to the next program, which goes on from them. No cut changes a bit.

The kernel is written in Gluon; on a CPU, tests run its Python with a stand-in (tests/ops/gluon_on_cpu.py).
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from compiled_mtp.ops.counters import zero_counters
from compiled_mtp.ops.device import device_of
from compiled_mtp.ops.left_config import GROUP_ROWS, LargeMTile, share_tasks
from compiled_mtp.ops.left_load import load_chunks
from compiled_mtp.ops.left_operand import LeftWeight, memory_layout
from compiled_mtp.ops.left_scales import words_of_scales
from compiled_mtp.ops.left_sums import multiply_chunks

OPTIONS = {"enable_fp_fusion": True}
UNIT = 128


# Triton would compile other kernels for a value of 1 and for multiples of 16.
@gluon.jit(do_not_specialize=["rows", "n", "units", "all_units", "num_tiles", "share", "more", "unit"])
def left_large_m_kernel(
    x, weight, weight_scale, out, slots, flags, rows, n, weight_stride, units, all_units, num_tiles, share,
    more, unit,
    BM: gl.constexpr, GROUPS: gl.constexpr, REGISTERS: gl.constexpr, STAGES: gl.constexpr,
    CHUNK: gl.constexpr, AHEAD: gl.constexpr, KIND: gl.constexpr, WIDTH: gl.constexpr,
    FIELDS: gl.constexpr, ABOVE: gl.constexpr, BLOCK_WORDS: gl.constexpr, PARTS: gl.constexpr,
    GATED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Compute the program's share of a product: BM rows by 64 GROUPS weight rows a task; GROUPS: 2 to 5.

    x: a descriptor of tiles [BM, 128] of the rows. units: those of a K split; all_units: of a whole row.
    num_tiles: of the weight's rows. weight_scale: words of 32 bits. slots: float32 numbers [programs,
    64 GROUPS, BM], what programs hand over. flags: zeros, and zeros again after the launch. KIND to PARTS:
    the weight's LeftForm. GATED: as `weight_row` has it.
    """
    program = gl.program_id(0)
    begin = (program * share + gl.minimum(program, more)) * unit
    end = ((program + 1) * share + gl.minimum(program + 1, more)) * unit
    words = gl.allocate_shared_memory(gl.int16, [STAGES * CHUNK * GROUPS, 64, 32], memory_layout(32))
    above = words
    fields = words
    if ABOVE > 0:
        above = gl.allocate_shared_memory(
            gl.int16, [STAGES * CHUNK * GROUPS, 64, ABOVE], memory_layout(ABOVE)
        )
    if AHEAD == 0:
        COUNT: gl.constexpr = STAGES * CHUNK * GROUPS * words_of_scales(KIND, FIELDS)
        fields = gl.allocate_shared_memory(gl.int32, [COUNT, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    shared_x = gl.allocate_shared_memory(gl.bfloat16, [STAGES * CHUNK, BM, 128], x.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        # The threads that copy words, and the one that asks for rows.
        mbarrier.init(full.index(stage), count=129)
        mbarrier.init(empty.index(stage), count=GROUPS)
    given = (
        weight_scale, out, words, above, fields, shared_x, full, empty, slots, flags, rows, n, units,
        all_units, num_tiles, begin, end,
    )  # fmt: skip
    sources = (
        x, weight, weight_scale, words, above, fields, shared_x, full, empty, rows, n, weight_stride, units,
        num_tiles, begin, end,
    )  # fmt: skip
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (
                    multiply_chunks,
                    (given, 0, BM, GROUPS, STAGES, CHUNK, AHEAD, KIND, WIDTH, FIELDS, PARTS, GATED, PDL),
                ),
                (
                    multiply_chunks,
                    (given, 1, BM, GROUPS, STAGES, CHUNK, AHEAD, KIND, WIDTH, FIELDS, PARTS, GATED, PDL),
                ),
                (
                    load_chunks,
                    (sources, BM, GROUPS, STAGES, CHUNK, AHEAD, KIND, FIELDS, ABOVE, BLOCK_WORDS, GATED, PDL),
                ),
            ],
            [4, 4],
            [REGISTERS, 40],
        )
    elif GROUPS == 3:
        gl.warp_specialize(
            [
                (
                    multiply_chunks,
                    (given, 0, BM, GROUPS, STAGES, CHUNK, AHEAD, KIND, WIDTH, FIELDS, PARTS, GATED, PDL),
                ),
                (
                    multiply_chunks,
                    (given, 1, BM, GROUPS, STAGES, CHUNK, AHEAD, KIND, WIDTH, FIELDS, PARTS, GATED, PDL),
                ),
                (
                    multiply_chunks,
                    (given, 2, BM, GROUPS, STAGES, CHUNK, AHEAD, KIND, WIDTH, FIELDS, PARTS, GATED, PDL),
                ),
                (
                    load_chunks,
                    (sources, BM, GROUPS, STAGES, CHUNK, AHEAD, KIND, FIELDS, ABOVE, BLOCK_WORDS, GATED, PDL),
                ),
            ],
            [4, 4, 4],
            [REGISTERS, REGISTERS, 40],
        )
    elif GROUPS == 4:
        gl.warp_specialize(
            [
                (
                    multiply_chunks,
                    (given, 0, BM, GROUPS, STAGES, CHUNK, AHEAD, KIND, WIDTH, FIELDS, PARTS, GATED, PDL),
                ),
                (
                    multiply_chunks,
                    (given, 1, BM, GROUPS, STAGES, CHUNK, AHEAD, KIND, WIDTH, FIELDS, PARTS, GATED, PDL),
                ),
                (
                    multiply_chunks,
                    (given, 2, BM, GROUPS, STAGES, CHUNK, AHEAD, KIND, WIDTH, FIELDS, PARTS, GATED, PDL),
                ),
                (
                    multiply_chunks,
                    (given, 3, BM, GROUPS, STAGES, CHUNK, AHEAD, KIND, WIDTH, FIELDS, PARTS, GATED, PDL),
                ),
                (
                    load_chunks,
                    (sources, BM, GROUPS, STAGES, CHUNK, AHEAD, KIND, FIELDS, ABOVE, BLOCK_WORDS, GATED, PDL),
                ),
            ],
            [4, 4, 4, 4],
            [REGISTERS, REGISTERS, REGISTERS, 40],
        )
    else:
        gl.warp_specialize(
            [
                (
                    multiply_chunks,
                    (given, 0, BM, GROUPS, STAGES, CHUNK, AHEAD, KIND, WIDTH, FIELDS, PARTS, GATED, PDL),
                ),
                (
                    multiply_chunks,
                    (given, 1, BM, GROUPS, STAGES, CHUNK, AHEAD, KIND, WIDTH, FIELDS, PARTS, GATED, PDL),
                ),
                (
                    multiply_chunks,
                    (given, 2, BM, GROUPS, STAGES, CHUNK, AHEAD, KIND, WIDTH, FIELDS, PARTS, GATED, PDL),
                ),
                (
                    multiply_chunks,
                    (given, 3, BM, GROUPS, STAGES, CHUNK, AHEAD, KIND, WIDTH, FIELDS, PARTS, GATED, PDL),
                ),
                (
                    multiply_chunks,
                    (given, 4, BM, GROUPS, STAGES, CHUNK, AHEAD, KIND, WIDTH, FIELDS, PARTS, GATED, PDL),
                ),
                (
                    load_chunks,
                    (sources, BM, GROUPS, STAGES, CHUNK, AHEAD, KIND, FIELDS, ABOVE, BLOCK_WORDS, GATED, PDL),
                ),
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
    device = device_of(x.device.index)
    units = k // UNIT // k_splits
    shares = share_tasks(tile, rows, n, k_splits, units, device.num_processors)
    size = shares.programs * tile.groups * GROUP_ROWS * tile.block_m
    left_large_m_kernel[(shares.programs,)](
        describe_rows(x, tile.block_m),
        weight.words,
        weight.scales,
        out,
        torch.empty(size, dtype=torch.float32, device=x.device),
        zero_counters(x.device),
        rows,
        n,
        weight.words.stride(0),
        units,
        k // UNIT,
        triton.cdiv(n, GROUP_ROWS * tile.groups),
        shares.share,
        shares.more,
        shares.unit,
        BM=tile.block_m,
        GROUPS=tile.groups,
        REGISTERS=tile.registers,
        STAGES=tile.num_stages,
        CHUNK=tile.chunk,
        AHEAD=tile.ahead,
        **weight.form.constants(),
        GATED=gated,
        PDL=device.has_dependent_launch,
        num_warps=4,
        launch_pdl=device.has_dependent_launch,
        **OPTIONS,
    )
    return out
