"""The warps of `persistent_kernel` that load: step after step, the tiles and in FP8 the scales."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Triton 3.9 renames the functions.
copy_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
copy_numbers = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
LOADING_THREADS = gl.constexpr(128)


@gluon.jit
def place_of(share, more, unit):
    """Return begin and end of the program's share of the steps of its row tile's tasks.

    A share has `share` units of `unit` steps, each of the first `more` shares one more.
    """
    index = gl.program_id(1)
    begin = index * share + gl.minimum(index, more)
    end = begin + share
    if index < more:
        end += 1
    return begin * unit, end * unit


@gluon.jit
def part_of(task, part_bits):
    """Return the K split of a task, of 1 << part_bits."""
    return task & ((1 << part_bits) - 1)


@gluon.jit
def columns_of(task, part_bits, BN: gl.constexpr, REST: gl.constexpr, GATED: gl.constexpr):
    """Return where the result's columns of a task's two strips begin, of BN and REST weight rows."""
    HALVES: gl.constexpr = 2 if GATED else 1
    first = (task >> part_bits) * ((BN + REST) // HALVES)
    return first, first + BN // HALVES


@gluon.jit
def load_weight(weight_tiles, shared, bar, first, column, n, GATED: gl.constexpr):
    """Load a weight tile from row `first` on; gated, half of its rows of gate before those of up."""
    if GATED:
        HALF: gl.constexpr = shared.shape[0] // 2
        copy_tile(weight_tiles, [first, column], bar, shared.slice(0, HALF, 0))
        copy_tile(weight_tiles, [n // 2 + first, column], bar, shared.slice(HALF, HALF, 0))
    else:
        copy_tile(weight_tiles, [first, column], bar, shared)


@gluon.jit
def load_scales(
    shared, stage, bar, x_scale, x_scale_at, weight_scale, weight_row, block, scale_stride
):  # fmt: skip
    """Load the scales of a block of 128 columns: of the rows of x, and for each of them the weight's.

    All threads arrive at the barrier when theirs are there.
    """
    like = weight_row // 128 * scale_stride + block + gl.zeros_like(x_scale_at)
    copy_numbers(shared.index(2 * stage), x_scale + x_scale_at + block)
    copy_numbers(shared.index(2 * stage + 1), weight_scale + like)
    async_copy.mbarrier_arrive(bar, increment_count=False)


@gluon.jit
def load_tiles(
    x_tiles, weight_tiles, weight_rest, shared_x, shared_weight, shared_rest, shared_scale, ready, free,
    x_scale, weight_scale, rows, n, share, more, unit, steps, part_bits, x_scale_stride, scale_stride,
    BM: gl.constexpr, BN: gl.constexpr, REST: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    GATED: gl.constexpr, FP8: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Load the tiles of every step of the program's tasks, as stages become free."""
    BYTES: gl.constexpr = (BM + BN + REST) * BK * (x_tiles.dtype.primitive_bitwidth // 8)
    row_tile = gl.program_id(0)
    begin, end = place_of(share, more, unit)
    task = (end - 1) // steps
    x_scale_at = row_tile
    if FP8:
        row = row_tile * BM + gl.arange(0, BM, gl.BlockedLayout([1], [32], [4], [0]))
        x_scale_at = gl.minimum(row, rows - 1) * x_scale_stride
    # The weight does not depend on the kernel before: fill the stages with it while that kernel finishes.
    first_step = gl.maximum(begin - task * steps, 0)
    early = gl.minimum(end - task * steps - first_step, STAGES)
    first, rest_first = columns_of(task, part_bits, BN, REST, GATED)
    # A task's steps are neighbours in K, whatever chain they belong to.
    first_column = (part_of(task, part_bits) * steps + first_step) * BK
    for index in range(early):
        bar = ready.index(index)
        mbarrier.expect(bar, BYTES)
        column = first_column + index * BK
        load_weight(weight_tiles, shared_weight.index(index), bar, first, column, n, GATED)
        if REST > 0:
            load_weight(weight_rest, shared_rest.index(index), bar, rest_first, column, n, GATED)
    if PDL:
        gdc_wait()
        # Let the next kernel start only after the wait: measured, two waiting kernels slow down a third.
        gdc_launch_dependents()
    for index in range(early):
        column = first_column + index * BK
        copy_tile(x_tiles, [row_tile * BM, column], ready.index(index), shared_x.index(index))
        if FP8:
            load_scales(
                shared_scale, index, ready.index(index), x_scale, x_scale_at, weight_scale, first,
                column // BK, scale_stride,
            )  # fmt: skip
    count = early
    first_step += early
    while task * steps + steps > begin:
        first, rest_first = columns_of(task, part_bits, BN, REST, GATED)
        first_block = part_of(task, part_bits) * steps
        for step in range(first_step, gl.minimum(end - task * steps, steps)):
            column = (first_block + step) * BK
            stage = count % STAGES
            bar = ready.index(stage)
            mbarrier.wait(free.index(stage), (count // STAGES) & 1 ^ 1)
            mbarrier.expect(bar, BYTES)
            load_weight(weight_tiles, shared_weight.index(stage), bar, first, column, n, GATED)
            if REST > 0:
                load_weight(weight_rest, shared_rest.index(stage), bar, rest_first, column, n, GATED)
            copy_tile(x_tiles, [row_tile * BM, column], bar, shared_x.index(stage))
            if FP8:
                load_scales(
                    shared_scale, stage, bar, x_scale, x_scale_at, weight_scale, first, column // BK,
                    scale_stride,
                )  # fmt: skip
            count += 1
        task -= 1
        first_step = gl.maximum(begin - task * steps, 0)
