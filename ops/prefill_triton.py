"""The product of a prompt's rows: every number of rows and every tile adds the columns in one order.

Programs are persistent: they load one tile's columns while they store the sums of the tile before. From
Hopper on, the bulk copy engine moves tiles by descriptors, if matrix rows begin at multiples of 16 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from compiled_mtp.ops.descriptors import describe, is_describable
from compiled_mtp.ops.device import Device, device_of

OPTIONS = {"enable_fp_fusion": True}
# This number of row tiles run at about the same time, to share weight tiles in L2.
ROW_GROUP = 8


@triton.jit
def tile_place(tile, row_tiles, column_tiles, GROUP: tl.constexpr):
    """Return (row tile, column tile); tiles go through all columns of GROUP row tiles, then of the next."""
    first_row = tile // (GROUP * column_tiles) * GROUP
    height = tl.minimum(row_tiles - first_row, GROUP)
    in_group = tile % (GROUP * column_tiles)
    return first_row + in_group % height, in_group // height


@triton.jit
def load_tile(
    matrix, first_row, first_column, height, width, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Load a tile of a matrix [height, width] that has no descriptor, with zeros beyond its columns."""
    # Rows beyond the last load the last row; their results are never stored.
    row = tl.minimum(first_row + tl.arange(0, ROWS), height - 1).to(tl.int64)
    column = first_column + tl.arange(0, COLUMNS)
    return tl.load(
        matrix + row[:, None] * stride + column[None, :], mask=(column < width)[None, :], other=0.0
    )


# Otherwise Triton would compile further kernels, for one row and for multiples of 16 rows.
@triton.jit(do_not_specialize=["rows"])
def prefill_product_kernel(
    x,
    weight,
    out,
    rows,
    n,
    k,
    x_stride,
    weight_stride,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    DESCRIBED: tl.constexpr,
    OUT_DESCRIBED: tl.constexpr,
):
    """Write x @ weight.T to out; DESCRIBED: x and weight are descriptors, OUT_DESCRIBED: out is one."""
    row_tiles = tl.cdiv(rows, BM)
    column_tiles = tl.cdiv(n, BN)
    # One flattened loop: the pipeline does not run empty between two tiles.
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0), flatten=True):
        row_tile, column_tile = tile_place(tile, row_tiles, column_tiles, GROUP)
        first_row = row_tile * BM
        first_column = column_tile * BN
        total = tl.zeros((BM, BN), tl.float32)
        for at in range(0, k, BK):
            if DESCRIBED:
                x_tile = x.load([first_row, at])
                weight_tile = weight.load([first_column, at])
            else:
                x_tile = load_tile(x, first_row, at, rows, k, x_stride, BM, BK)
                weight_tile = load_tile(weight, first_column, at, n, k, weight_stride, BN, BK)
            total = tl.dot(x_tile, weight_tile.T, total)
        if OUT_DESCRIBED:
            out.store([first_row, first_column], total.to(out.dtype))
        else:
            row = first_row + tl.arange(0, BM)
            column = first_column + tl.arange(0, BN)
            is_inside = (row < rows)[:, None] & (column < n)[None, :]
            to = out + row.to(tl.int64)[:, None] * n + column[None, :]
            tl.store(to, total.to(out.dtype.element_ty), mask=is_inside)


@dataclass(frozen=True)
class PrefillTile:
    """Rows, weight rows and columns of a tile, its warps and its pipeline stages.

    None of them changes a bit of the result.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    # Time per sum relative to the widest tile's, measured on an H200.
    cost: float

    def shared_bytes(self, out_bytes: int) -> int:
        """Return the bytes that a program may need: for its stages, and for the sums before their store."""
        stages = self.num_stages * (self.block_m + self.block_n) * self.block_k * 2
        return stages + self.block_m * self.block_n * out_bytes


TILES = (
    PrefillTile(128, 256, 64, 8, 3, 1.0),
    PrefillTile(128, 128, 64, 4, 4, 1.05),
    PrefillTile(64, 128, 64, 4, 4, 1.2),
    PrefillTile(64, 64, 64, 4, 3, 1.5),
)


def choose_tile(device: Device, rows: int, n: int, out_bytes: int) -> PrefillTile:
    """Return the tile of the least estimated time, of those that fit in the device's shared memory."""

    def time(tile: PrefillTile) -> float:
        tiles = triton.cdiv(rows, tile.block_m) * triton.cdiv(n, tile.block_n)
        rounds = triton.cdiv(tiles, device.num_processors)
        return rounds * tile.block_m * tile.block_n * tile.cost

    fitting = [tile for tile in TILES if tile.shared_bytes(out_bytes) <= device.shared_bytes]
    return min(fitting, key=time)


def launch_prefill(x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """Return x @ weight.T in `out_dtype` for bfloat16 x [M, K] and weight [N, K]."""
    (rows, k), n = x.shape, weight.shape[0]
    out = torch.empty((rows, n), dtype=out_dtype, device=x.device)
    if rows == 0 or n == 0:
        return out
    device = device_of(x.device.index)
    tile = choose_tile(device, rows, n, out.element_size())
    described = device.has_copy_engine and is_describable(x) and is_describable(weight)
    out_described = described and is_describable(out)
    tiles = triton.cdiv(rows, tile.block_m) * triton.cdiv(n, tile.block_n)
    prefill_product_kernel[(min(tiles, device.num_processors),)](
        describe(x, tile.block_m, tile.block_k) if described else x,
        describe(weight, tile.block_n, tile.block_k) if described else weight,
        describe(out, tile.block_m, tile.block_n) if out_described else out,
        rows,
        n,
        k,
        # A single row may have any stride, and other values would compile another kernel.
        x.stride(0) if rows > 1 else k,
        weight.stride(0),
        BM=tile.block_m,
        BN=tile.block_n,
        BK=tile.block_k,
        GROUP=ROW_GROUP,
        DESCRIBED=described,
        OUT_DESCRIBED=out_described,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **OPTIONS,
    )
    return out
