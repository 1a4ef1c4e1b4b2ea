"""A product of few rows whose programs take all their weights into shared memory before the kernel before ends.

The weights of the next kernels come while the present one waits for its activations. All at once they would
stand in front of those, so a program asks for a piece only when all but a few of its earlier ones have come.
The bits are those of `linear_kernel` with the same parts of K. Written in Gluon, since Triton has no word for
when a copy to shared memory is sent.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_mtp.ops.device import device_of

OPTIONS = {"enable_fp_fusion": True}
# Triton 3.9 has another name for it.
async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.jit
def add_chains(sums, FIRST: gl.constexpr, COUNT: gl.constexpr):
    """The sums of COUNT neighbouring chains, added as a tree."""
    if COUNT == 1:
        return sums[FIRST]
    else:
        return add_chains(sums, FIRST, COUNT // 2) + add_chains(sums, FIRST + COUNT // 2, COUNT // 2)


@gluon.jit
def copy_weight(shared, at, tile, n, stride, GATED: gl.constexpr):
    """Send the columns at `at` of a tile's weight rows to shared memory [BN, columns]."""
    BN: gl.constexpr = shared.shape[0]
    COLUMNS: gl.constexpr = shared.shape[1]
    LANES: gl.constexpr = COLUMNS // 8 if COLUMNS < 256 else 32
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [gl.num_warps(), 1], [1, 0])
    in_tile = gl.arange(0, BN, gl.SliceLayout(1, layout))
    if GATED:
        # Of 16 weight rows eight of the gate and their partners, which one thread then holds.
        row = gl.minimum(tile * (BN // 2) + in_tile // 16 * 8 + in_tile % 8, n // 2 - 1)
        row += in_tile // 8 % 2 * (n // 2)
    else:
        # Weight rows beyond N are read as the last one and never stored.
        row = gl.minimum(tile * BN + in_tile, n - 1)
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    async_load(shared, at + row.to(gl.int64)[:, None] * stride + column[None, :])


@gluon.jit
def copy_rows(shared, at, rows, stride):
    """Send the columns at `at` of all rows to shared memory [BM, columns], zeros behind the last row."""
    BM: gl.constexpr = shared.shape[0]
    COLUMNS: gl.constexpr = shared.shape[1]
    LANES: gl.constexpr = COLUMNS // 8 if COLUMNS < 256 else 32
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [gl.num_warps(), 1], [1, 0])
    row = gl.arange(0, BM, gl.SliceLayout(1, layout))
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    is_inside = (row < rows)[:, None] & (column >= 0)[None, :]
    async_load(shared, at + row.to(gl.int64)[:, None] * stride + column[None, :], mask=is_inside)


@gluon.jit(do_not_specialize=["rows", "n"])
def held_kernel(
    x, weight, out, rows, n, x_stride, weight_stride,
    LENGTH: gl.constexpr, CHAINS: gl.constexpr, FIRSTS: gl.constexpr, PIECES: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, GATED: gl.constexpr, KEEP_PARTS: gl.constexpr,
    IN_FLIGHT: gl.constexpr, EARLY: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Weights on the left: tiles of BN weight rows, 16 a warp, and BM rows."""
    if PDL and EARLY:
        gdc_launch_dependents()
    WARPS: gl.constexpr = gl.num_warps()
    sums_layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    weight_layout: gl.constexpr = gl.DotOperandLayout(0, sums_layout, 2)
    x_layout: gl.constexpr = gl.DotOperandLayout(1, sums_layout, 2)
    shared_layout: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    tile = gl.program_id(0)
    part = gl.program_id(1)
    first_k = part * (LENGTH * CHAINS)

    copies = ()
    for piece in gl.static_range(len(PIECES)):
        copies += (gl.allocate_shared_memory(gl.bfloat16, [CHAINS, BN, PIECES[piece]], shared_layout),)
    for chain in gl.static_range(CHAINS):
        for piece in gl.static_range(len(PIECES)):
            at = weight + (first_k + chain * LENGTH + FIRSTS[piece])
            copy_weight(copies[piece].index(chain), at, tile, n, weight_stride, GATED)
            async_copy.commit_group()
            if chain * len(PIECES) + piece >= IN_FLIGHT:
                async_copy.wait_group(IN_FLIGHT)
    if PDL:
        gdc_wait()
        if not EARLY:
            gdc_launch_dependents()

    inputs = ()
    for piece in gl.static_range(len(PIECES)):
        inputs += (gl.allocate_shared_memory(gl.bfloat16, [CHAINS, BM, PIECES[piece]], shared_layout),)
    for chain in gl.static_range(CHAINS):
        for piece in gl.static_range(len(PIECES)):
            at = x + (first_k + chain * LENGTH + FIRSTS[piece])
            copy_rows(inputs[piece].index(chain), at, rows, x_stride)
    async_copy.commit_group()
    async_copy.wait_group(0)
    gl.thread_barrier()

    sums = ()
    for chain in gl.static_range(CHAINS):
        total = gl.zeros([BN, BM], gl.float32, sums_layout)
        for piece in gl.static_range(len(PIECES)):
            weight_tile = copies[piece].index(chain).load(weight_layout)
            x_tile = inputs[piece].index(chain).permute([1, 0]).load(x_layout)
            total = mma_v2(weight_tile, x_tile, total, input_precision="ieee")
        sums += (total,)
    total = add_chains(sums, 0, CHAINS)

    dtype: gl.constexpr = out.dtype.element_ty
    if GATED:
        pairs = gl.reshape(total.to(dtype).to(gl.float32), [BN // 16, 2, 8, BM])
        gate, up = gl.split(gl.permute(pairs, [0, 2, 3, 1]))
        total = gl.reshape(gate / (1.0 + gl.exp(-gate)) * up, [BN // 2, BM])
        WIDTH: gl.constexpr = BN // 2
        columns = n // 2
    else:
        WIDTH: gl.constexpr = BN
        columns = n
    store_layout: gl.constexpr = gl.BlockedLayout([2, 1], [8, 4], [WARPS, 1], [0, 1])
    total = gl.convert_layout(total, store_layout)
    column = tile * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(1, store_layout))
    row = gl.arange(0, BM, gl.SliceLayout(0, store_layout))
    to = out + row.to(gl.int64)[None, :] * columns + column[:, None]
    if KEEP_PARTS:
        to += part.to(gl.int64) * rows * columns
    gl.store(to, total.to(dtype), mask=(row < rows)[None, :] & (column < columns)[:, None])


def launch_held(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    split: int,
    chains: int,
    block_n: int,
    in_flight: int,
    early: bool,
    gated: bool,
    keep_parts: bool,
    most: int = 128,
) -> torch.Tensor:
    (rows, k), n = x.shape, weight.shape[0]
    length = k // (split * chains)
    assert length * split * chains == k and length % 64 == 0 and rows <= 16
    pieces, firsts, left = [], [], length
    while left:
        firsts.append(length - left)
        pieces.append(min(most, 1 << (left.bit_length() - 1)))
        left -= pieces[-1]
    has_pdl = x.is_cuda and device_of(x.device.index).has_dependent_launch
    held_kernel[(triton.cdiv(n, block_n), split)](
        x, weight, out, rows, n, x.stride(0) if rows > 1 else k, weight.stride(0),
        LENGTH=length, CHAINS=chains, FIRSTS=tuple(firsts), PIECES=tuple(pieces),
        BM=8 if rows <= 8 else 16, BN=block_n, GATED=gated, KEEP_PARTS=keep_parts,
        IN_FLIGHT=in_flight, EARLY=early, PDL=has_pdl,
        num_warps=block_n // 16, launch_pdl=has_pdl, **OPTIONS,
    )  # fmt: skip
    return out
