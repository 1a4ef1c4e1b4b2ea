"""Device code of products whose left operand is decoded weight rows, written in Gluon.

A warp of a tensor core's product multiplies 16 rows on the left by 8 on the right. With the weight on the
left, few rows need no padding, and a weight is decoded in the registers that the tensor cores read. Triton
does not choose which operand lies in registers, Gluon does. Triton's interpreter cannot run Gluon: on a CPU,
tests run its Python with a stand-in (tests/ops/gluon_on_cpu.py).

A program copies chunks of some units of 128 columns of its weight rows, and of its rows, to shared memory,
several chunks ahead. Weights have blocks of 16 rows whose units lie together (ops.int4, ops.blocks).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

# Triton 3.9 renames the function.
async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.constexpr_function
def copy_layout(columns, num_warps):
    """A layout of eight columns per thread, with as many threads per row as it has such groups."""
    lanes = min(32, columns // 8)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [num_warps, 1], [1, 0])


@gluon.constexpr_function
def memory_layout(columns):
    """A layout of shared memory in which eight neighbouring rows of `columns` numbers of 16 bits lie in all
    banks."""
    rows = max(1, 64 // columns)
    return gl.SwizzledSharedLayout(8, rows, 8 // rows, [1, 0])


@gluon.jit
def spread(column, like):
    """A column [BN] as wide as `like`."""
    return gl.expand_dims(column, 1).broadcast_to(like.shape)


@gluon.jit
def weight_row(tile, n, in_tile, BN: gl.constexpr, GATED: gl.constexpr):
    """The weight rows of a tile's rows. Those beyond N read the last block of 16, and are never stored.

    GATED: the tile's upper half are rows of the gate, its lower half those of up.
    """
    if GATED:
        block = gl.minimum(tile * (BN // 32) + in_tile // 16 % (BN // 32), n // 32 - 1)
        block += in_tile // (BN // 2) * (n // 32)
    else:
        block = gl.minimum(tile * (BN // 16) + in_tile // 16, n // 16 - 1)
    return block * 16 + in_tile % 16


@gluon.jit
def copy_words(
    to, words_at, first, end, layout: gl.constexpr, PER_ROW: gl.constexpr, PER_BLOCK: gl.constexpr
):
    """Copy as many units of the tile's weight rows as `to` holds, from `first` on; zeros from `end` on.

    PER_ROW, PER_BLOCK: words of a unit of one row, and of a block of 16 rows.
    """
    word = gl.arange(0, to.shape[1], gl.SliceLayout(0, layout))
    async_load(to, words_at + first * PER_BLOCK, mask=(word < (end - first) * PER_ROW)[None, :])


@gluon.jit
def copy_rows(to, x_at, is_row, first, end, layout: gl.constexpr):
    """Copy as many units of the rows as `to` holds, from `first` on; zeros from `end` on."""
    column = gl.arange(0, to.shape[1], gl.SliceLayout(0, layout))
    async_load(to, x_at + first * 128, mask=is_row[:, None] & (column < (end - first) * 128)[None, :])
    async_copy.commit_group()


@gluon.jit
def halves_of(tile):
    """The upper and the lower half of [BN, BM], which one thread holds both of."""
    BN: gl.constexpr = tile.shape[0]
    BM: gl.constexpr = tile.shape[1]
    return gl.split(gl.permute(gl.reshape(tile, [2, BN // 2, BM]), [1, 2, 0]))


@gluon.jit
def store_tile(
    total, out, tile, first_row, partial, rows, n,
    layout: gl.constexpr, BN: gl.constexpr, BM: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Store the sums [BN weight rows, BM rows] into out [partials, rows, N], or silu(gate) * up."""
    to_row = first_row + gl.arange(0, BM, gl.SliceLayout(0, layout))
    dtype: gl.constexpr = out.dtype.element_ty
    in_tile = gl.arange(0, BN, gl.SliceLayout(1, layout))
    if GATED:
        width = n // 2
        to_column = tile * (BN // 2) + in_tile % (BN // 2)
    else:
        width = n
        to_column = tile * BN + in_tile
    at = (partial.to(gl.int64) * rows + to_row)[None, :] * width + to_column[:, None]
    is_stored = (to_row < rows)[None, :] & (to_column < width)[:, None]
    if GATED:
        # Rounded as silu_mul does it on the rounded sums.
        gate, up = halves_of(total.to(dtype).to(gl.float32))
        total = gate / (1.0 + gl.exp(-gate)) * up
        at, _ = halves_of(at)
        is_stored, _ = halves_of(is_stored.to(gl.int8))
        is_stored = is_stored != 0
    gl.store(out + at, total.to(dtype), mask=is_stored)
