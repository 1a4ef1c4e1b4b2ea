"""A product of many rows on Hopper: warps that load tiles, warpgroups that multiply, persistent programs.

A task is one K split of one tile of BN weight rows, for one tile of BM rows. The programs of a row tile share
its tasks evenly, to a step of BK columns, so that all processors work equally long. A task may therefore be
cut in two: a program hands the float32 sums of the first columns over to the next program, which goes on
from them. Where a weight has few tiles, several programs sum some of a tile's K splits each, and add what
they have as a tree. Neither changes a bit: the order of sums over K is that of `linear_kernel` and
`linear_w8a8_kernel`.

Programs of several row tiles have the same tasks at the same time: the weight is read from memory once.

The kernel is written in Gluon, because Triton cannot give warps different work. On a CPU, tests run its
Python with a stand-in (tests/ops/persistent_on_cpu.py).
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from compiled_mtp.ops.counters import zero_counters
from compiled_mtp.ops.device import device_of
from compiled_mtp.ops.persistent_config import STEP_BYTES, PersistentProduct
from compiled_mtp.ops.persistent_load import LOADING_THREADS, load_tiles
from compiled_mtp.ops.persistent_tasks import multiply_tiles

OPTIONS = {"enable_fp_fusion": True}
# Of a thread that multiplies. The warps that load get the others.
MULTIPLY_REGISTERS = gl.constexpr(232)


@gluon.jit(do_not_specialize=["rows", "share", "more", "unit", "steps", "part_bits"])
def persistent_kernel(
    x_tiles, weight_tiles, weight_rest, out, x_scale, weight_scale, slots, flags, rows, n, share, more, unit,
    steps, part_bits, x_scale_stride, scale_stride,
    BM: gl.constexpr, BN: gl.constexpr, REST: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    CHAINS: gl.constexpr, HELD: gl.constexpr, GATED: gl.constexpr, FP8: gl.constexpr, PDL: gl.constexpr,
    TOGETHER: gl.constexpr,
):  # fmt: skip
    """Compute the program's share of a product.

    x_tiles, weight_tiles: descriptors of tiles [BM, BK] and [BN, BK], [BN / 2, BK] if gated; weight_rest: of
    REST more rows of the weight. BM: 128, 64 rows for each of two warpgroups; BN: 128 with FP8, whose blocks
    of scales are as high, and REST 0. slots: see multiply_tiles. flags: zeros, and zeros again after the
    launch. HELD: waiting nodes of a task's tree that stay in registers. TOGETHER: the programs that sum a
    tile's K splits add them.
    """
    shared_x = gl.allocate_shared_memory(x_tiles.dtype, [STAGES, BM, BK], x_tiles.layout)
    shared_weight = gl.allocate_shared_memory(weight_tiles.dtype, [STAGES, BN, BK], weight_tiles.layout)
    shared_rest = shared_weight
    if REST > 0:
        shared_rest = gl.allocate_shared_memory(weight_rest.dtype, [STAGES, REST, BK], weight_rest.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    shared_scale = ready
    if FP8:
        # Of rows of x, and of the weight once for each of them.
        scale_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        shared_scale = gl.allocate_shared_memory(gl.float32, [2 * STAGES, BM], scale_layout)
    for stage in gl.static_range(STAGES):
        # With FP8 all threads that load arrive, when their scales have.
        mbarrier.init(ready.index(stage), count=1 + (LOADING_THREADS if FP8 else 0))
        mbarrier.init(free.index(stage), count=BM // 64)
    fence_async_shared()
    STRIPS: gl.constexpr = (BN, REST) if REST > 0 else (BN,)
    gl.warp_specialize(
        [
            (load_tiles, (
                x_tiles, weight_tiles, weight_rest, shared_x, shared_weight, shared_rest, shared_scale, ready,
                free, x_scale, weight_scale, rows, n, share, more, unit, steps, part_bits, x_scale_stride,
                scale_stride, BM, BN, REST, BK, STAGES, GATED, FP8, PDL,
            )),
            (multiply_tiles, (
                shared_x, shared_weight, shared_rest, shared_scale, ready, free, out, slots, flags, rows, n,
                share, more, unit, steps, part_bits, 0, BM, STRIPS, STAGES, CHAINS, HELD, GATED, FP8,
                PDL, TOGETHER,
            )),
            (multiply_tiles, (
                shared_x, shared_weight, shared_rest, shared_scale, ready, free, out, slots, flags, rows, n,
                share, more, unit, steps, part_bits, 1, BM, STRIPS, STAGES, CHAINS, HELD, GATED, FP8,
                PDL, TOGETHER,
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
    rows, n, tile = x.shape[0], weight.shape[0], product.tile
    device = device_of(x.device.index)
    parts = 1 if product.is_shared else product.parts
    out = torch.empty((parts, rows, n // 2 if gated else n), dtype=out_dtype, device=x.device)
    size = product.row_tiles * product.shares * product.slots * tile.block_m * (tile.block_n + tile.rest_n)
    slots = torch.empty(size, dtype=torch.float32, device=x.device)
    step = STEP_BYTES // x.element_size()
    persistent_kernel[(product.row_tiles, product.shares)](
        describe_tiles(x, tile.block_m, step),
        describe_tiles(weight, tile.block_n // 2 if gated else tile.block_n, step),
        describe_tiles(weight, tile.rest_n // 2 if gated else tile.rest_n, step) if tile.rest_n else None,
        out,
        x_scale,
        weight_scale,
        slots,
        zero_counters(x.device),
        rows,
        n,
        *divmod(product.tasks * product.steps // product.unit, product.shares),
        product.unit,
        product.steps,
        product.parts.bit_length() - 1,
        0 if x_scale is None else x_scale.stride(0),
        0 if weight_scale is None else weight_scale.stride(0),
        BM=tile.block_m,
        BN=tile.block_n,
        REST=tile.rest_n,
        BK=step,
        STAGES=tile.num_stages,
        CHAINS=product.chains,
        HELD=product.held_levels(x.element_size()),
        GATED=gated,
        FP8=x_scale is not None,
        PDL=device.has_dependent_launch,
        TOGETHER=product.is_shared,
        num_warps=4,
        launch_pdl=device.has_dependent_launch,
        **OPTIONS,
    )
    return out
