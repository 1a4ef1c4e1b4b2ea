"""Device code of products whose left operand is decoded weight rows, written in Gluon.

A warp of a tensor core's product multiplies 16 rows on the left by 8 on the right. With the weight on the
left, few rows need no padding, and a weight is decoded in the registers that the tensor cores read. Triton
does not choose which operand lies in registers, Gluon does. Triton's interpreter cannot run Gluon: on a CPU,
tests run its Python with a stand-in (tests/ops/gluon_on_cpu.py).

Weights have blocks of 16 rows whose units of 128 columns lie together (ops.int4, ops.blocks).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from compiled_mtp.ops.left_config import LeftForm

# Triton 3.9 renames the function.
async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@dataclass(frozen=True)
class LeftWeight:
    """A weight [N, K] in codes: words [N, W] int16, the 32-bit words of its scales, and its form."""

    words: torch.Tensor
    scales: torch.Tensor
    form: LeftForm


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
def as_float(bits):
    """The float32 number that has these bits."""
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def spread(column, like):
    """A column [BN] as wide as `like`."""
    return gl.expand_dims(column, 1).broadcast_to(like.shape)


@gluon.jit
def weight_row(tile, n, in_tile, BN: gl.constexpr, GATED: gl.constexpr):
    """The weight rows of a tile's rows. Those beyond N read the last block of 16, and are never stored.

    GATED: by turns eight rows of the gate and those of up; one thread holds the sums of both.
    """
    block = gl.minimum(tile * (BN // 16) + in_tile // 16, n // 16 - 1)
    if GATED:
        return block * 8 + in_tile % 8 + in_tile % 16 // 8 * (n // 2)
    else:
        return block * 16 + in_tile % 16


@gluon.jit
def words_of_rows(weight, row, stride, word, PER_ROW: gl.constexpr, BLOCK_WORDS: gl.constexpr):
    """Where the words `word` of the first units of weight rows `row` lie, PER_ROW words in a row's unit."""
    at = weight + ((row // 16).to(gl.int64) * (16 * stride) + row % 16 * PER_ROW)[:, None]
    return at + (word // PER_ROW * BLOCK_WORDS + word % PER_ROW)[None, :]


@gluon.jit
def words_above(
    weight, row, stride, word, PER_ROW: gl.constexpr, BLOCK_WORDS: gl.constexpr, KIND: gl.constexpr
):
    """As `words_of_rows`, of what codes have above four bits."""
    # Two rows share the words of a fifth bit.
    in_block = row % 16 // 2 if KIND == "Q5_K" else row % 16
    at = weight + ((row // 16).to(gl.int64) * (16 * stride) + in_block * PER_ROW)[:, None]
    return at + (512 + word // PER_ROW * BLOCK_WORDS + word % PER_ROW)[None, :]


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
    """Of each 16 rows of [BN, BM] the first eight and the others, each [BN / 2, BM]."""
    BN: gl.constexpr = tile.shape[0]
    BM: gl.constexpr = tile.shape[1]
    first, second = gl.split(gl.permute(gl.reshape(tile, [BN // 16, 2, 8, BM]), [0, 2, 3, 1]))
    return gl.reshape(first, [BN // 2, BM]), gl.reshape(second, [BN // 2, BM])


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
        to_column = tile * (BN // 2) + in_tile // 16 * 8 + in_tile % 8
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
