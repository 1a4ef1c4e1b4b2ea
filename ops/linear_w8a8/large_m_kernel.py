"""x @ weight.T in FP8 with the rows as left operand, and the copy engine to bring both.

A thread then holds sums of two rows of a piece and needs two factors of rows for a step, where with the
weight on the left it loads one for every row that it holds sums of (32 at 128 rows). A program has COUNT
pieces of B1 weight rows, each within one block of scales, and a sliver of B2 rows of what the pieces of all
programs leave over, so that one round of programs does it. The order of sums is that of
`linear_w8a8_kernel`, and so are the bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from compiled_mtp.ops.device import device_of
from compiled_mtp.ops.linear_w8a8.keep import keep
from compiled_mtp.ops.linear_w8a8.large_m_config import LargeMTile

OPTIONS = {"enable_fp_fusion": True}


@triton.jit
def zero_sums(BM: tl.constexpr, B1: tl.constexpr, B2: tl.constexpr, COUNT: tl.constexpr, KEEP: tl.constexpr):
    sums = ()
    for _ in tl.static_range(COUNT):
        zero = tl.zeros((BM, B1), tl.float32)
        sums += (keep(zero) if KEEP else zero,)
    if B2 > 0:
        zero = tl.zeros((BM, B2), tl.float32)
        sums += (keep(zero) if KEEP else zero,)
    return sums


@triton.jit
def add_sums(left, right, COUNT: tl.constexpr):
    result = ()
    for index in tl.static_range(COUNT):
        result += (left[index] + right[index],)
    return result


@triton.jit
def keep_sums(sums, COUNT: tl.constexpr, ON_DEVICE: tl.constexpr):
    result = ()
    for index in tl.static_range(COUNT):
        result += (keep(sums[index]) if ON_DEVICE else sums[index],)
    return result


@triton.jit
def add_product(total, x_tile, weight_tile, row_factor, factor):
    product = tl.dot(x_tile, weight_tile.T)
    return tl.fma(product, tl.broadcast_to((row_factor * factor)[:, None], product.shape), total)


@triton.jit
def store_piece(total, out, row, rows, first, n, WIDTH: tl.constexpr):
    column = first + tl.arange(0, WIDTH)
    at = out + row.to(tl.int64)[:, None] * n + column[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (column < n)[None, :])


@triton.jit(do_not_specialize=["rows", "scale_stride", "x_scale_stride"])
def large_m_w8a8_kernel(
    x_tiles, x_scale, weight_tiles, rest_tiles, weight, weight_scale, out, rows, n, weight_stride,
    x_scale_stride, scale_stride, split_length,
    BM: tl.constexpr, B1: tl.constexpr, COUNT: tl.constexpr, B2: tl.constexpr, SHARES: tl.constexpr,
    STAGES: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr, ON_DEVICE: tl.constexpr,
):  # fmt: skip
    row_tiles = tl.cdiv(rows, BM)
    tile = tl.program_id(0) // row_tiles
    first_row = tl.program_id(0) % row_tiles * BM
    row = first_row + tl.arange(0, BM)
    first = tile * (COUNT * B1)
    # The pieces of all programs end here, or with the weight.
    whole = tl.num_programs(0) // row_tiles * (COUNT * B1)
    rest = whole + tile * B2
    first_k = tl.program_id(1) * (split_length * SHARES)
    PIECES: tl.constexpr = COUNT + (1 if B2 > 0 else 0)
    if PDL:
        if PREFETCH > 0:
            for piece in tl.static_range(COUNT):
                own = tl.minimum(first + piece * B1 + tl.arange(0, B1), n - 1).to(tl.int64)
                tl.inline_asm_elementwise(
                    "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
                    "=r,l,r",
                    [
                        (weight + own * weight_stride + first_k).to(tl.uint64, bitcast=True),
                        tl.full((B1,), PREFETCH, tl.int32),
                    ],
                    dtype=tl.int32,
                    is_pure=False,
                    pack=1,
                )
        gdc_wait()
        # The next kernel may come only now: measured, two kernels that wait crowd a third.
        gdc_launch_dependents()
    x_scale_at = x_scale + tl.minimum(row, rows - 1).to(tl.int64) * x_scale_stride + first_k // 128
    scales = ()
    for piece in tl.static_range(COUNT):
        scales += (
            weight_scale + tl.minimum(first + piece * B1, n - 1) // 128 * scale_stride + first_k // 128,
        )
    if B2 > 0:
        scales += (weight_scale + tl.minimum(rest, n - 1) // 128 * scale_stride + first_k // 128,)
    total = zero_sums(BM, B1, B2, COUNT, False)
    # The left halves of the tree's nodes whose right halves are yet to come: of one, two and four shares.
    one = total
    two = total
    four = total
    share = 0
    left = split_length
    # Named here, the stages are those of the factors' loads too.
    for block in tl.range(0, split_length * SHARES // 128, num_stages=STAGES):
        at = first_k + block * 128
        row_factor = tl.load(x_scale_at + block)
        x_tile = x_tiles.load([first_row, at])
        new = ()
        for piece in tl.static_range(COUNT):
            weight_tile = weight_tiles.load([first + piece * B1, at])
            new += (
                add_product(total[piece], x_tile, weight_tile, row_factor, tl.load(scales[piece] + block)),
            )
        if B2 > 0:
            new += (
                add_product(
                    total[COUNT],
                    x_tile,
                    rest_tiles.load([rest, at]),
                    row_factor,
                    tl.load(scales[COUNT] + block),
                ),
            )
        total = new
        if SHARES > 1:
            left -= 128
            if left == 0:
                left = split_length
                if share & 1 == 0:
                    one = keep_sums(total, PIECES, ON_DEVICE)
                elif SHARES > 2:
                    if share & 2 == 0:
                        two = keep_sums(add_sums(one, total, PIECES), PIECES, ON_DEVICE)
                    elif SHARES > 4:  # noqa: SIM102  a constant and a number
                        if share & 4 == 0:
                            both = add_sums(two, add_sums(one, total, PIECES), PIECES)
                            four = keep_sums(both, PIECES, ON_DEVICE)
                share += 1
                if share < SHARES:
                    total = zero_sums(BM, B1, B2, COUNT, ON_DEVICE)
    if SHARES > 1:
        total = add_sums(one, total, PIECES)
    if SHARES > 2:
        total = add_sums(two, total, PIECES)
    if SHARES > 4:
        total = add_sums(four, total, PIECES)
    part_out = out + tl.program_id(1).to(tl.int64) * rows * n
    for piece in tl.static_range(COUNT):
        store_piece(total[piece], part_out, row, rows, first + piece * B1, n, B1)
    if B2 > 0:
        store_piece(total[COUNT], part_out, row, rows, rest, n, B2)


def describe(matrix: torch.Tensor, height: int) -> TensorDescriptor:
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [height, 128])


def launch_large_m(
    tile: LargeMTile,
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    count: int,
    split_length: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """[count, M, N] of shares of `split_length` columns, of matrices that have descriptors."""
    (rows, k), n = x.shape, weight.shape[0]
    out = torch.empty((count, rows, n), dtype=dtype, device=x.device)
    has_pdl = device_of(x.device.index).has_dependent_launch
    tiles = triton.cdiv(rows, tile.block_m) * triton.cdiv(n, tile.width)
    large_m_w8a8_kernel[(tiles, count)](
        describe(x, tile.block_m),
        x_scale,
        describe(weight, tile.block_n),
        describe(weight, tile.rest_n) if tile.rest_n else None,
        weight,
        weight_scale,
        out,
        rows,
        n,
        weight.stride(0),
        x_scale.stride(0),
        weight_scale.stride(0),
        split_length,
        BM=tile.block_m,
        B1=tile.block_n,
        COUNT=tile.count,
        B2=tile.rest_n,
        SHARES=k // (split_length * count),
        STAGES=tile.num_stages,
        PREFETCH=min(tile.prefetch_bytes, k // count),
        PDL=has_pdl,
        ON_DEVICE=x.is_cuda,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        launch_pdl=has_pdl,
        **OPTIONS,
    )
    return out
