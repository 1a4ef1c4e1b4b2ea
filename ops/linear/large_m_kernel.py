"""The large-M product on Hopper: the copy engine loads weights and rows while the tensor cores work.

A tile has B1 + B2 weight rows, two powers of two, so that all programs of a weight can run at the same time.
With 128 weight rows per tile, 27B's gate|up would have 272 tiles: 264 run at once, and the last 8 would take
as long again. The order of sums over K, and so the bits, are those of `linear_kernel`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_mtp.ops.descriptors import describe
from compiled_mtp.ops.device import device_of
from compiled_mtp.ops.linear.large_m_config import LargeMProduct, LargeMTile

OPTIONS = {"enable_fp_fusion": True}


@triton.jit
def zero_sums(BM: tl.constexpr, B1: tl.constexpr, B2: tl.constexpr, PIECES: tl.constexpr):
    """Return zero sums of a tile's B1 and B2 weight rows.

    Gated products have two PIECES: B1 or B2 rows of gate, followed by the same number of rows of up.
    """
    sums = (tl.zeros((BM, PIECES * B1), tl.float32),)
    if B2 > 0:
        sums += (tl.zeros((BM, PIECES * B2), tl.float32),)
    return sums


@triton.jit
def add_sums(left, right, COUNT: tl.constexpr):
    result = ()
    for index in tl.static_range(COUNT):
        result += (left[index] + right[index],)
    return result


@triton.jit
def close_chain(sums, one, two, four, chain, COUNT: tl.constexpr, CHAINS: tl.constexpr):
    """Return the largest finished node of the tree of chains, and the left halves that wait."""
    if chain & 1 == 0:
        one = sums
    else:
        sums = add_sums(one, sums, COUNT)
        if CHAINS > 2:
            if chain & 2 == 0:
                two = sums
            else:
                sums = add_sums(two, sums, COUNT)
                if CHAINS > 4:
                    if chain & 4 == 0:
                        four = sums
                    else:
                        sums = add_sums(four, sums, COUNT)
    return sums, one, two, four


@triton.jit
def load_weights(tiles, first, at, ROWS: tl.constexpr, BK: tl.constexpr, GATED: tl.constexpr):
    """Load [ROWS, BK] from row `first` on, or gated [2 * ROWS, BK].

    Gate and up share a product, which reads x's tile from shared memory once; two products would read it
    twice.
    """
    if GATED:
        return tl.reshape(tiles.load([0, first, at]), (2 * ROWS, BK))
    else:
        return tiles.load([first, at])


@triton.jit
def add_columns(
    sums, x_tile, tiles, rest_tiles, first, at,
    B1: tl.constexpr, B2: tl.constexpr, BK: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Return `sums` plus the products of one step's columns."""
    result = (tl.dot(x_tile, load_weights(tiles, first, at, B1, BK, GATED).T, sums[0]),)
    if B2 > 0:
        rest = load_weights(rest_tiles, first + B1, at, B2, BK, GATED)
        result += (tl.dot(x_tile, rest.T, sums[1]),)
    return result


@triton.jit
def prefetch_rows(weight, row, stride, BYTES: tl.constexpr, ROWS: tl.constexpr):
    """Send BYTES of each of ROWS weight rows to L2."""
    address = (weight + row.to(tl.int64) * stride).to(tl.uint64, bitcast=True)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [address, tl.full((ROWS,), BYTES, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def store_tile(total, out, row, rows, column, width):
    at = out + row.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (column < width)[None, :])


@triton.jit
def silu_times(total, BM: tl.constexpr, ROWS: tl.constexpr, dtype: tl.constexpr):
    """Return silu(gate) * up [BM, ROWS] of sums [BM, 2 * ROWS], with the bits of silu_mul on rounded sums."""
    gate, up = tl.split(tl.permute(tl.reshape(total, (BM, 2, ROWS)), (0, 2, 1)))
    gate = gate.to(dtype).to(tl.float32)
    up = up.to(dtype).to(tl.float32)
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit(do_not_specialize=["rows"])
def large_m_kernel(
    x_tiles, weight_tiles, rest_tiles, weight, out, rows, n, weight_stride, part_length,
    BM: tl.constexpr, B1: tl.constexpr, B2: tl.constexpr, BK: tl.constexpr, CHAINS: tl.constexpr,
    GATED: tl.constexpr, PREFETCH: tl.constexpr, SPECIALIZED: tl.constexpr, APART: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute one tile for the K splits of one program.

    x_tiles: a descriptor of x's tiles [BM, BK]. weight_tiles, rest_tiles: descriptors of the weight's tiles
    [B1, BK] and [B2, BK], or [2, B1, BK] and [2, B2, BK] of a gated weight's halves.
    """
    # Neighbouring programs share a weight tile, so that all except the first find it in L2.
    row_tiles = tl.cdiv(rows, BM)
    tile = tl.program_id(0)
    first_row = tile % row_tiles * BM
    row = first_row + tl.arange(0, BM)
    first = tile // row_tiles * (B1 + B2)
    partial = tl.program_id(1)
    first_k = partial * (part_length * CHAINS)
    half = n // 2
    COUNT: tl.constexpr = 2 if B2 > 0 else 1
    PIECES: tl.constexpr = 2 if GATED else 1
    if PDL:
        if PREFETCH > 0:
            own = tl.minimum(first + tl.arange(0, B1), (half if GATED else n) - 1)
            prefetch_rows(weight + first_k, own, weight_stride, PREFETCH, B1)
            if GATED:
                prefetch_rows(weight + first_k, half + own, weight_stride, PREFETCH, B1)
        gdc_wait()
        # Let the next kernel start only after the wait: measured, two waiting kernels slow down a third.
        gdc_launch_dependents()
    sums = zero_sums(BM, B1, B2, PIECES)
    # Sums of one, two and four chains that wait for the right half of their node in the tree.
    one = sums
    two = sums
    four = sums
    if APART:
        for chain in range(CHAINS):
            sums = zero_sums(BM, B1, B2, PIECES)
            chain_k = first_k + chain * part_length
            for at in tl.range(0, part_length, BK, warp_specialize=SPECIALIZED):
                x_tile = x_tiles.load([first_row, chain_k + at])
                sums = add_columns(
                    sums, x_tile, weight_tiles, rest_tiles, first, chain_k + at, B1, B2, BK, GATED
                )
            if CHAINS > 1:
                sums, one, two, four = close_chain(sums, one, two, four, chain, COUNT, CHAINS)
    else:
        chain = 0
        left = part_length
        for at in tl.range(0, part_length * CHAINS, BK, warp_specialize=SPECIALIZED):
            x_tile = x_tiles.load([first_row, first_k + at])
            sums = add_columns(sums, x_tile, weight_tiles, rest_tiles, first, first_k + at, B1, B2, BK, GATED)
            if CHAINS > 1:
                left -= BK
                if left == 0:
                    left = part_length
                    sums, one, two, four = close_chain(sums, one, two, four, chain, COUNT, CHAINS)
                    chain += 1
                    if chain < CHAINS:
                        sums = zero_sums(BM, B1, B2, PIECES)
    column = first + tl.arange(0, B1)
    if GATED:
        dtype: tl.constexpr = out.dtype.element_ty
        store_tile(silu_times(sums[0], BM, B1, dtype), out, row, rows, column, half)
        if B2 > 0:
            column = first + B1 + tl.arange(0, B2)
            store_tile(silu_times(sums[1], BM, B2, dtype), out, row, rows, column, half)
    else:
        part_out = out + partial.to(tl.int64) * rows * n
        store_tile(sums[0], part_out, row, rows, column, n)
        if B2 > 0:
            store_tile(sums[1], part_out, row, rows, first + B1 + tl.arange(0, B2), n)


def launch_large_m(
    tile: LargeMTile, product: LargeMProduct, x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    """Compute x @ weight.T of bfloat16 matrices that have descriptors, with the K splits of `product`.

    Returns [M, N]; gated, silu(gate) * up [M, N / 2]; before a norm, partials [split, M, N].
    """
    (rows, k), n = x.shape, weight.shape[0]
    width = product.width
    shape = (product.split, rows, width) if product.keep_partials else (rows, width)
    out = torch.empty(shape, dtype=out_dtype, device=x.device)
    has_pdl = device_of(x.device.index).has_dependent_launch
    tiles = triton.cdiv(rows, tile.block_m) * triton.cdiv(width, tile.block_n + tile.rest_n)
    length = k // (product.split * product.chains)
    halves, pieces = (weight.unflatten(0, (2, n // 2)), (2,)) if product.gated else (weight, ())
    large_m_kernel[(tiles, product.split)](
        describe(x, tile.block_m, tile.block_k),
        describe(halves, *pieces, tile.block_n, tile.block_k),
        describe(halves, *pieces, tile.rest_n, tile.block_k) if tile.rest_n else None,
        weight,
        out,
        rows,
        n,
        weight.stride(0),
        length,
        BM=tile.block_m,
        B1=tile.block_n,
        B2=tile.rest_n,
        BK=tile.block_k,
        CHAINS=product.chains,
        GATED=product.gated,
        PREFETCH=min(tile.prefetch_bytes, 2 * product.chains * length),
        SPECIALIZED=tile.specialized,
        APART=tile.apart,
        PDL=has_pdl,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        launch_pdl=has_pdl,
        **OPTIONS,
    )
    return out
