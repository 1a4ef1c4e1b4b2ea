"""The side product, which runs during the product before it: only its store comes after the wait."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_mtp.ops.device import device_of

OPTIONS = {"enable_fp_fusion": True}
# One tile for every number of rows: a row keeps its bits. With few rows the programs share processors with a
# product that fills them, and so may take little shared memory; but loads take twice as long during that
# product, and need enough columns per step: with half as many, b|a of 27B ends 4 us after in_proj.
BLOCK_ROWS, BLOCK_WEIGHT_ROWS, BLOCK_K, NUM_STAGES = 16, 16, 256, 4
# With more rows that product leaves only a few processors free, where small programs would all crowd. With
# this many stages each needs a processor of its own, and most get one when the product ends.
FEW_ROWS, MANY_STAGES = 32, 10
# Chains of K, one per warp: in a single chain every product waits for the previous one. 128 rows and 96
# weight rows of 5,120 columns take 24 us after in_proj with one chain, 13 us with four (16 us with tiles of
# 32 rows).
CHAINS = 4


@triton.jit(do_not_specialize=["rows", "n"])
def side_kernel(
    x, weight, out, rows, n, x_stride, weight_stride,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, CHAINS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute one tile in CHAINS chains, each of whole steps of BK / CHAINS columns.

    The first two chains are added, the last two, and then both sums.
    """
    if PDL:
        gdc_launch_dependents()
    row_tiles = tl.cdiv(rows, BM)
    tile = tl.program_id(0)
    row = tile % row_tiles * BM + tl.arange(0, BM)
    column = tile // row_tiles * BN + tl.arange(0, BN)
    step: tl.constexpr = BK // CHAINS
    length: tl.constexpr = (K + BK - 1) // BK * step
    in_k = tl.arange(0, CHAINS)[:, None] * length + tl.arange(0, step)[None, :]
    # Rows and weight rows beyond the last load the last one; their sums are never stored.
    x_at = x + tl.minimum(row, rows - 1).to(tl.int64)[None, :, None] * x_stride + in_k[:, None, :]
    weight_at = weight + tl.minimum(column, n - 1).to(tl.int64)[None, :, None] * weight_stride
    weight_at += in_k[:, None, :]
    total = tl.zeros((CHAINS, BM, BN), tl.float32)
    for at in range(0, length, step):
        if CHAINS * length == K:
            x_tile = tl.load(x_at + at)
            weight_tile = tl.load(weight_at + at)
        else:
            is_inside = (in_k < K - at)[:, None, :]
            x_tile = tl.load(x_at + at, mask=is_inside, other=0.0)
            weight_tile = tl.load(weight_at + at, mask=is_inside, other=0.0)
        total = tl.dot(x_tile, tl.permute(weight_tile, (0, 2, 1)), total, input_precision="ieee")
    pairs = tl.permute(tl.reshape(total, (CHAINS // 2, 2, BM, BN)), (0, 2, 3, 1))
    left, right = tl.split(pairs)
    left, right = tl.split(tl.permute(left + right, (1, 2, 0)))
    if PDL:
        gdc_wait()
    to = out + row.to(tl.int64)[:, None] * n + column[None, :]
    tl.store(to, (left + right).to(out.dtype.element_ty), mask=(row < rows)[:, None] & (column < n)[None, :])


def launch_side(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x @ weight.T [M, N] in x's dtype."""
    (rows, k), n = x.shape, weight.shape[0]
    out = torch.empty((rows, n), dtype=x.dtype, device=x.device)
    if rows == 0 or n == 0:
        return out
    device = device_of(x.device.index)
    has_pdl = device.has_dependent_launch
    programs = triton.cdiv(rows, BLOCK_ROWS) * triton.cdiv(n, BLOCK_WEIGHT_ROWS)
    # float32 takes twice the bytes of bfloat16: a step has half as many columns.
    block_k = BLOCK_K * 2 // x.element_size()
    stage_bytes = (BLOCK_ROWS + BLOCK_WEIGHT_ROWS) * BLOCK_K * 2
    is_spread = has_pdl and rows > FEW_ROWS and device.shared_bytes >= MANY_STAGES * stage_bytes
    side_kernel[(programs,)](
        x,
        weight,
        out,
        rows,
        n,
        # A single row may have any stride, and other values would compile another kernel.
        x.stride(0) if rows > 1 else k,
        weight.stride(0),
        K=k,
        BM=BLOCK_ROWS,
        BN=BLOCK_WEIGHT_ROWS,
        BK=min(block_k, max(16 * CHAINS, triton.next_power_of_2(k))),
        CHAINS=CHAINS,
        PDL=has_pdl,
        num_warps=CHAINS,
        num_stages=MANY_STAGES if is_spread else NUM_STAGES,
        launch_pdl=has_pdl,
        **OPTIONS,
    )
    return out
