"""A product of many rows on Hopper: warps that load tiles, warpgroups that multiply, persistent programs.

A task is one K split of one tile of BN weight rows, for one tile of BM rows. The programs of a row tile share
its tasks evenly, to a step of BK columns, so that all processors work equally long. A task may therefore be
cut in two: a program hands the float32 sums of the first columns over to the next program, which goes on
from them. No cut changes a bit: the order of sums over K is that of `linear_kernel` and `linear_w8a8_kernel`.

Programs of several row tiles have the same tasks at the same time: the weight is read from memory once.

The kernel is written in Gluon, because Triton cannot give warps different work. On a CPU, tests run its
Python with a stand-in (tests/ops/persistent_on_cpu.py).
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_mtp.ops.counters import zero_counters
from compiled_mtp.ops.device import device_of
from compiled_mtp.ops.persistent_config import STEP_BYTES, PersistentProduct
from compiled_mtp.ops.persistent_slots import await_flag, close_chain, keep, load_slot, set_flag, store_slot

OPTIONS = {"enable_fp_fusion": True}
# Triton 3.9 renames the function.
copy_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
# Of a thread that multiplies. The warps that load get the others.
MULTIPLY_REGISTERS = gl.constexpr(216)


@gluon.constexpr_function
def sums_layout(width, is_fp8):
    """Return the layout of a warpgroup's sums of `width` weight rows."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 32 if is_fp8 else 16])


@gluon.constexpr_function
def tree_levels(chains):
    """Return the most nodes of the tree of chains that wait for their right half."""
    return chains.bit_length() - 1


@gluon.jit
def place_of(tasks, steps, unit, row_tiles):
    """Return the program's row tile, and begin and end of its share of the steps of the row tile's tasks.

    Shares are cut at multiples of `unit` steps.
    """
    row_tile = gl.program_id(0) % row_tiles
    index = gl.program_id(0) // row_tiles
    shares = gl.num_programs(0) // row_tiles
    units = tasks * steps // unit
    return row_tile, index * units // shares * unit, (index + 1) * units // shares * unit


@gluon.jit
def load_weight(weight_tiles, shared, bar, first, column, n, BN: gl.constexpr, GATED: gl.constexpr):
    """Load a weight tile from row `first` on; gated, BN / 2 rows of gate before those of up."""
    if GATED:
        copy_tile(weight_tiles, [first, column], bar, shared.slice(0, BN // 2, 0))
        copy_tile(weight_tiles, [n // 2 + first, column], bar, shared.slice(BN // 2, BN // 2, 0))
    else:
        copy_tile(weight_tiles, [first, column], bar, shared)


@gluon.jit
def load_tiles(
    x_tiles, weight_tiles, shared_x, shared_weight, ready, free, rows, n, tasks, parts, steps, unit,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Load the tiles of every step of the program's tasks, as stages become free."""
    BYTES: gl.constexpr = (BM + BN) * BK * (x_tiles.dtype.primitive_bitwidth // 8)
    # Weight rows of a tile's columns of the result.
    COLUMNS: gl.constexpr = BN // 2 if GATED else BN
    row_tile, begin, end = place_of(tasks, steps, unit, (rows + BM - 1) // BM)
    first = begin // steps
    last = (end - 1) // steps
    # The weight does not depend on the kernel before: fill the stages with it while that kernel finishes.
    first_step = gl.maximum(begin - last * steps, 0)
    early = gl.minimum(end - last * steps - first_step, STAGES)
    weight_row = last // parts * COLUMNS
    first_column = (last % parts * steps + first_step) * BK
    for index in range(early):
        bar = ready.index(index)
        mbarrier.expect(bar, BYTES)
        column = first_column + index * BK
        load_weight(weight_tiles, shared_weight.index(index), bar, weight_row, column, n, BN, GATED)
    if PDL:
        gdc_wait()
        # Let the next kernel start only after the wait: measured, two waiting kernels slow down a third.
        gdc_launch_dependents()
    for index in range(early):
        column = first_column + index * BK
        copy_tile(x_tiles, [row_tile * BM, column], ready.index(index), shared_x.index(index))
    count = early
    for index in range(last - first + 1):
        task = last - index
        weight_row = task // parts * COLUMNS
        first_step = gl.maximum(begin - task * steps, 0)
        if index == 0:
            first_step += early
        for step in range(first_step, gl.minimum(end - task * steps, steps)):
            # A task's steps are neighbours in K, whatever chain they belong to.
            column = (task % parts * steps + step) * BK
            stage = count % STAGES
            bar = ready.index(stage)
            mbarrier.wait(free.index(stage), (count // STAGES) & 1 ^ 1)
            mbarrier.expect(bar, BYTES)
            load_weight(weight_tiles, shared_weight.index(stage), bar, weight_row, column, n, BN, GATED)
            copy_tile(x_tiles, [row_tile * BM, column], bar, shared_x.index(stage))
            count += 1


@gluon.jit
def start_step(
    sums, shared_x, shared_weight, ready, count, USE_SUMS: gl.constexpr,
    FIRST: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Start a step's product as soon as its tiles are there, with USE_SUMS added to `sums`."""
    stage = count % STAGES
    mbarrier.wait(ready.index(stage), (count // STAGES) & 1)
    left = shared_x.index(stage).slice(FIRST, 64, 0)
    right = shared_weight.index(stage).permute([1, 0])
    return warpgroup_mma(left, right, sums, use_acc=USE_SUMS, is_async=True)


@gluon.jit
def add_columns(
    sums, shared_x, shared_weight, ready, free, count, number,
    FIRST: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Return `sums` plus the bfloat16 products of `number` steps, and the steps so far."""
    # As traceable values, sums of a slot would make the assembler wait for each product.
    sums = keep(sums)
    for step in range(number):
        sums = start_step(sums, shared_x, shared_weight, ready, count, True, FIRST, STAGES)
        # The product of the step before has ended: its stage is free.
        sums = warpgroup_mma_wait(1, deps=[sums])
        mbarrier.arrive(free.index((count + STAGES - 1) % STAGES), count=1, pred=step > 0)
        count += 1
    sums = warpgroup_mma_wait(0, deps=[sums])
    mbarrier.arrive(free.index((count + STAGES - 1) % STAGES), count=1)
    return sums, count


@gluon.jit
def add_blocks(
    sums, shared_x, shared_weight, ready, free, count, number, x_scale_at, scale_at,
    FIRST: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Return `sums` plus the FP8 products of `number` blocks of 128 columns, scaled, and the steps so far.

    What a tensor core adds is imprecise: never more than a block, whose sum is multiplied in float32.
    """
    for step in range(number):
        product = gl.zeros_like(sums)
        product = start_step(product, shared_x, shared_weight, ready, count, False, FIRST, STAGES)
        # The scales arrive during the product. Loaded a step ahead, they would be waited for before it.
        scale = gl.load(x_scale_at + step) * gl.load(scale_at + step)
        product = warpgroup_mma_wait(0, deps=[product])
        mbarrier.arrive(free.index(count % STAGES), count=1)
        sums = gl.fma(product, scale[:, None] + gl.zeros_like(product), sums)
        count += 1
    return sums, count


@gluon.jit
def halves(tile, WIDTH: gl.constexpr):
    """Return the left and the right half of a tile [64, WIDTH]."""
    return gl.split(gl.permute(gl.reshape(tile, [64, 2, WIDTH // 2]), [0, 2, 1]))


@gluon.jit
def store_sums(
    sums, out, first_row, first_column, rows, width, WIDTH: gl.constexpr, GATED: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Round and store a warpgroup's sums; gated, silu(gate) * up with silu_mul's bits on rounded sums."""
    dtype: gl.constexpr = out.dtype.element_ty
    row = keep(first_row) + gl.arange(0, 64, gl.SliceLayout(1, layout))
    column = first_column + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    at = row.to(gl.int64)[:, None] * width + column.to(gl.int64)[None, :]
    inside = (row < rows)[:, None] & (column < width)[None, :]
    if GATED:
        at, _ = halves(at, WIDTH)
        inside, _ = halves(inside.to(gl.int8), WIDTH)
        # Rounded first, since neighbours share a conversion.
        gate, up = halves(sums.to(dtype).to(gl.float32), WIDTH)
        gl.store(out + at, (gate / (1.0 + gl.exp(-gate)) * up).to(dtype), mask=inside != 0)
    else:
        gl.store(out + at, sums.to(dtype), mask=inside)


@gluon.jit
def multiply_tiles(
    shared_x, shared_weight, ready, free, out, x_scale, weight_scale, slots, flags, rows, n, tasks, parts,
    steps, unit, x_scale_stride, scale_stride,
    GROUP: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, CHAINS: gl.constexpr,
    GATED: gl.constexpr, FP8: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Sum the program's tasks for the 64 rows of warpgroup GROUP."""
    FIRST: gl.constexpr = GROUP * 64
    GROUPS: gl.constexpr = BM // 64
    layout: gl.constexpr = sums_layout(BN, FP8)
    # Slots of a warpgroup: the sums of a cut chain and the waiting nodes of its task's tree, from which the
    # next program goes on, and the waiting nodes of the other tasks.
    LEVELS: gl.constexpr = tree_levels(CHAINS)
    SLOTS: gl.constexpr = 1 + 2 * LEVELS
    HELD: gl.constexpr = CHAINS == 2 and BN <= 128 and not FP8
    if PDL:
        gdc_wait()
    row_tiles = (rows + BM - 1) // BM
    row_tile, begin, end = place_of(tasks, steps, unit, row_tiles)
    first_row = row_tile * BM + FIRST
    own = gl.program_id(0) * GROUPS + GROUP
    before = own - row_tiles * GROUPS
    width = n // 2 if GATED else n
    first = begin // steps
    last = (end - 1) // steps
    length = steps // CHAINS
    count = 0
    x_scale_at = x_scale
    if FP8:
        row = gl.minimum(first_row + gl.arange(0, 64, gl.SliceLayout(1, layout)), rows - 1)
        x_scale_at = x_scale + row.to(gl.int64) * x_scale_stride
    for index in range(last - first + 1):
        # Begin with the task that the next program completes: it needs these sums at its end.
        task = last - index
        part = task % parts
        column = task // parts * (BN // 2 if GATED else BN)
        from_step = gl.maximum(begin - task * steps, 0)
        to_step = gl.minimum(end - task * steps, steps)
        nodes = own * SLOTS + 1
        if from_step > 0:
            await_flag(flags + before)
            nodes = before * SLOTS + 1
        elif to_step == steps:
            nodes += LEVELS
        sums = gl.zeros([64, BN], gl.float32, layout)
        # The first of two chains, which waits for the second in registers where these suffice.
        held = sums
        if HELD:  # noqa: SIM102  a constant and a number
            if from_step >= length:
                held = load_slot(sums, slots, nodes, layout)
        for chain in range(from_step // length, (to_step + length - 1) // length):
            first_step = gl.maximum(from_step, chain * length)
            number = gl.minimum(to_step, (chain + 1) * length) - first_step
            sums = gl.zeros([64, BN], gl.float32, layout)
            if first_step > chain * length:
                sums = load_slot(sums, slots, before * SLOTS, layout)
            if FP8:
                block = part * steps + first_step
                scale_at = weight_scale + column // 128 * scale_stride + block
                sums, count = add_blocks(
                    sums, shared_x, shared_weight, ready, free, count, number, x_scale_at + block, scale_at,
                    FIRST, STAGES,
                )  # fmt: skip
            else:
                sums, count = add_columns(
                    sums, shared_x, shared_weight, ready, free, count, number, FIRST, STAGES,
                )  # fmt: skip
            if HELD:
                if chain == 0:
                    held = sums
                elif to_step == steps:
                    sums = held + sums
            elif CHAINS > 1:  # noqa: SIM102
                if first_step + number == (chain + 1) * length:
                    sums = close_chain(sums, slots, nodes, chain, CHAINS, layout)
        if to_step < steps:
            store_slot(sums, slots, own * SLOTS, layout)
            if HELD:  # noqa: SIM102
                if to_step >= length:
                    store_slot(held, slots, nodes, layout)
            set_flag(flags + own)
        else:
            part_out = out + part.to(gl.int64) * rows * width
            store_sums(sums, part_out, first_row, column, rows, width, BN, GATED, layout)


@gluon.jit(do_not_specialize=["rows", "tasks", "parts", "steps", "unit"])
def persistent_kernel(
    x_tiles, weight_tiles, out, x_scale, weight_scale, slots, flags, rows, n, tasks, parts, steps, unit,
    x_scale_stride, scale_stride,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, CHAINS: gl.constexpr,
    GATED: gl.constexpr, FP8: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Compute the program's share of a product.

    x_tiles, weight_tiles: descriptors of tiles [BM, BK] and [BN, BK], [BN / 2, BK] if gated. BM: 128, 64 rows
    for each of two warpgroups; BN: 128 with FP8, whose blocks of scales are as high. slots: see
    multiply_tiles. flags: zeros, and zeros again after the launch.
    """
    shared_x = gl.allocate_shared_memory(x_tiles.dtype, [STAGES, BM, BK], x_tiles.layout)
    shared_weight = gl.allocate_shared_memory(weight_tiles.dtype, [STAGES, BN, BK], weight_tiles.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (load_tiles, (
                x_tiles, weight_tiles, shared_x, shared_weight, ready, free, rows, n, tasks, parts, steps,
                unit, BM, BN, BK, STAGES, GATED, PDL,
            )),
            (multiply_tiles, (
                shared_x, shared_weight, ready, free, out, x_scale, weight_scale, slots, flags, rows, n,
                tasks, parts, steps, unit, x_scale_stride, scale_stride, 0, BM, BN, STAGES, CHAINS, GATED,
                FP8, PDL,
            )),
            (multiply_tiles, (
                shared_x, shared_weight, ready, free, out, x_scale, weight_scale, slots, flags, rows, n,
                tasks, parts, steps, unit, x_scale_stride, scale_stride, 1, BM, BN, STAGES, CHAINS, GATED,
                FP8, PDL,
            )),
        ],
        [4, 4],
        [MULTIPLY_REGISTERS, MULTIPLY_REGISTERS],
    )  # fmt: skip


def describe_tiles(matrix: torch.Tensor, height: int, columns: int) -> TensorDescriptor:
    """Return a descriptor of tiles [height, columns] of `matrix`; they hold zeros outside it."""
    size = matrix.element_size()
    layout = gl.NVMMASharedLayout(swizzle_byte_width=columns * size, element_bitwidth=8 * size, rank=2)
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [height, columns], layout)


def launch_persistent(
    product: PersistentProduct,
    x: torch.Tensor,
    weight: torch.Tensor,
    out_dtype: torch.dtype,
    gated: bool = False,
    x_scale: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute x @ weight.T of bfloat16 matrices, or of FP8 ones with their scales, that have descriptors.

    Returns [parts, M, N]; gated, silu(gate) * up [1, M, N / 2].
    """
    (rows, k), n, tile = x.shape, weight.shape[0], product.tile
    device = device_of(x.device.index)
    out = torch.empty((product.parts, rows, n // 2 if gated else n), dtype=out_dtype, device=x.device)
    programs = product.shares * product.row_tiles
    size = programs * product.slots * tile.block_m * tile.block_n
    slots = torch.empty(size, dtype=torch.float32, device=x.device)
    step = STEP_BYTES // x.element_size()
    steps = k // (product.parts * step)
    persistent_kernel[(programs,)](
        describe_tiles(x, tile.block_m, step),
        describe_tiles(weight, tile.block_n // 2 if gated else tile.block_n, step),
        out,
        x_scale,
        weight_scale,
        slots,
        zero_counters(x.device),
        rows,
        n,
        product.tasks,
        product.parts,
        steps,
        1 if product.is_cut else steps,
        0 if x_scale is None else x_scale.stride(0),
        0 if weight_scale is None else weight_scale.stride(0),
        BM=tile.block_m,
        BN=tile.block_n,
        BK=step,
        STAGES=tile.num_stages,
        CHAINS=product.chains,
        GATED=gated,
        FP8=x_scale is not None,
        PDL=device.has_dependent_launch,
        num_warps=4,
        launch_pdl=device.has_dependent_launch,
        **OPTIONS,
    )
    return out
