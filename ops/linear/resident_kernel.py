"""A product of few rows whose programs load all their weights before the previous kernel ends.

The weights of a layer's next kernels then load while the present kernel waits for its activations. Requested
all at once, they would delay those activations, so a program requests the next columns only when all except
a few of its earlier copies have finished. The bits are those of `linear_kernel` with the same K splits.

The kernel is written in Gluon, because Triton cannot say when a copy to shared memory is sent. Triton's
interpreter cannot run Gluon: on a CPU, tests run its Python with a stand-in (tests/ops/gluon_on_cpu.py).
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_mtp.ops.linear.config import LinearConfig
from compiled_mtp.ops.linear.resident_config import ResidentTile

OPTIONS = {"enable_fp_fusion": True}
# Triton 3.9 renames the function.
async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.jit
def copy_columns(shared, at, row, is_inside, stride, layout: gl.constexpr):
    """Copy columns of rows `row` from `at` on to shared memory, as many as it has; zeros where not inside."""
    column = gl.arange(0, shared.shape[1], gl.SliceLayout(0, layout))
    at += row.to(gl.int64)[:, None] * stride + column[None, :]
    if is_inside is None:
        async_load(shared, at)
    else:
        async_load(shared, at, mask=is_inside[:, None] & (column >= 0)[None, :])


@gluon.constexpr_function
def copy_layout(columns, num_warps):
    """Return a layout of eight columns per thread, with as many threads per row as it has such groups."""
    lanes = min(32, columns // 8)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [num_warps, 1], [1, 0])


@gluon.jit
def copy_weight(shared, at, tile, n, stride, GATED: gl.constexpr):
    """Copy columns of a tile's weight rows from `at` on to shared memory."""
    layout: gl.constexpr = copy_layout(shared.shape[1], gl.num_warps())
    in_tile = gl.arange(0, shared.shape[0], gl.SliceLayout(1, layout))
    if GATED:
        # Alternate weight rows of gate and up.
        row = tile * (shared.shape[0] // 2) + in_tile // 2
        row = gl.minimum(row, n // 2 - 1) + in_tile % 2 * (n // 2)
    else:
        # Weight rows beyond N load the last row; their sums are never stored.
        row = gl.minimum(tile * shared.shape[0] + in_tile, n - 1)
    copy_columns(shared, at, row, None, stride, layout)


@gluon.jit
def copy_rows(shared, at, rows, stride):
    """Copy columns of all rows from `at` on to shared memory."""
    layout: gl.constexpr = copy_layout(shared.shape[1], gl.num_warps())
    row = gl.arange(0, shared.shape[0], gl.SliceLayout(1, layout))
    copy_columns(shared, at, row, row < rows, stride, layout)


@gluon.jit
def add_chains(sums, FIRST: gl.constexpr, COUNT: gl.constexpr):
    """Return the sums of COUNT neighbouring chains, added as a tree."""
    if COUNT == 1:
        return sums[FIRST]
    else:
        return add_chains(sums, FIRST, COUNT // 2) + add_chains(sums, FIRST + COUNT // 2, COUNT // 2)


@gluon.jit
def by_turns(tile, BN: gl.constexpr, BM: gl.constexpr):
    """Return rows 0, 2, ... and rows 1, 3, ... of [BN, BM], each [BN / 2, BM]."""
    return gl.split(gl.permute(gl.reshape(tile, [BN // 2, 2, BM]), [0, 2, 1]))


@gluon.jit
def store_sums(total, out, tile, rows, n, GATED: gl.constexpr):
    """Round and store sums [BN weight rows, BM rows].

    GATED: store silu(gate) * up of neighbouring rows, with the bits of silu_mul on the rounded sums.
    """
    BN: gl.constexpr = total.shape[0]
    BM: gl.constexpr = total.shape[1]
    dtype: gl.constexpr = out.dtype.element_ty
    layout: gl.constexpr = gl.BlockedLayout([2, 1], [8, 4], [gl.num_warps(), 1], [0, 1])
    total = gl.convert_layout(total, layout)
    in_tile = gl.arange(0, BN, gl.SliceLayout(1, layout))
    row = gl.arange(0, BM, gl.SliceLayout(0, layout))
    if GATED:
        width = n // 2
        column = tile * (BN // 2) + in_tile // 2
    else:
        width = n
        column = tile * BN + in_tile
    at = row[None, :] * width + column[:, None]
    is_inside = (row < rows)[None, :] & (column < width)[:, None]
    if GATED:
        gate, up = by_turns(total.to(dtype).to(gl.float32), BN, BM)
        total = gate / (1.0 + gl.exp(-gate)) * up
        at, _ = by_turns(at, BN, BM)
        is_inside, _ = by_turns(is_inside.to(gl.int8), BN, BM)
        is_inside = is_inside != 0
    gl.store(out + at, total.to(dtype), mask=is_inside)


@gluon.jit(do_not_specialize=["rows", "n"])
def resident_kernel(
    x, weight, out, rows, n, x_stride, weight_stride,
    LENGTH: gl.constexpr, CHAINS: gl.constexpr, FIRSTS: gl.constexpr, PIECES: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, IN_FLIGHT: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Compute a tile of BN weight rows (the left operand, 16 rows per warp) and BM rows.

    A program sums CHAINS chains of LENGTH columns; a chain is copied in PIECES that begin at columns FIRSTS.
    """
    gdc_launch_dependents()
    layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [gl.num_warps(), 1], [16, 8])
    shared_layout: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    COUNT: gl.constexpr = len(PIECES)
    tile = gl.program_id(0)
    partial = gl.program_id(1)
    first_k = partial * (LENGTH * CHAINS)
    weights = ()
    inputs = ()
    for index in gl.static_range(CHAINS * COUNT):
        weights += (gl.allocate_shared_memory(gl.bfloat16, [BN, PIECES[index % COUNT]], shared_layout),)
        inputs += (gl.allocate_shared_memory(gl.bfloat16, [BM, PIECES[index % COUNT]], shared_layout),)
    for index in gl.static_range(CHAINS * COUNT):
        column = first_k + index // COUNT * LENGTH + FIRSTS[index % COUNT]
        copy_weight(weights[index], weight + column, tile, n, weight_stride, GATED)
        async_copy.commit_group()
        if index >= IN_FLIGHT:
            async_copy.wait_group(IN_FLIGHT)
    gdc_wait()
    for index in gl.static_range(CHAINS * COUNT):
        column = first_k + index // COUNT * LENGTH + FIRSTS[index % COUNT]
        copy_rows(inputs[index], x + column, rows, x_stride)
    async_copy.commit_group()
    async_copy.wait_group(0)
    sums = ()
    for chain in gl.static_range(CHAINS):
        total = gl.zeros([BN, BM], gl.float32, layout)
        for piece in gl.static_range(COUNT):
            weight_tile = weights[chain * COUNT + piece].load(gl.DotOperandLayout(0, layout, 2))
            x_tile = inputs[chain * COUNT + piece].permute([1, 0]).load(gl.DotOperandLayout(1, layout, 2))
            total = mma_v2(weight_tile, x_tile, total, input_precision="ieee")
        sums += (total,)
    out += partial.to(gl.int64) * rows * n
    store_sums(add_chains(sums, 0, CHAINS), out, tile, rows, n, GATED)


def launch_resident(
    tile: ResidentTile,
    config: LinearConfig,
    x: torch.Tensor,
    weight: torch.Tensor,
    out_dtype: torch.dtype,
    gated: bool = False,
    keep_partials: bool = False,
) -> torch.Tensor:
    """Compute x @ weight.T of up to 16 bfloat16 rows, with the K splits of `config`.

    Returns [M, N]; gated, silu(gate) * up [M, N / 2]; before a norm, partials [split, M, N].
    """
    (rows, k), n = x.shape, weight.shape[0]
    width = n // 2 if gated else n
    shape = (config.split, rows, width) if keep_partials else (rows, width)
    out = torch.empty(shape, dtype=out_dtype, device=x.device)
    if rows == 0:
        return out
    length = config.part_length(k)
    pieces = tile.pieces(length)
    resident_kernel[(triton.cdiv(n, tile.block_n), config.split)](
        x, weight, out, rows, n,
        # A single row may have any stride, and other values would compile another kernel.
        x.stride(0) if rows > 1 else k,
        weight.stride(0),
        LENGTH=length,
        CHAINS=config.chains,
        FIRSTS=tuple(sum(pieces[:index]) for index in range(len(pieces))),
        PIECES=tuple(pieces),
        BM=8 if rows <= 8 else 16,
        BN=tile.block_n,
        IN_FLIGHT=tile.in_flight,
        GATED=gated,
        num_warps=tile.block_n // 16,
        launch_pdl=True,
        **OPTIONS,
    )  # fmt: skip
    return out
