"""x @ weight.T in FP8 on Hopper's tensor cores, with the weight as left operand.

So one class of instruction, QGMMA, serves any number of rows (large_m_kernel.py has it too): from 64 weight
rows, 4 warps and 16 activation rows on Triton makes nothing else of it, and a test counts them. What it adds
up inside is imprecise, so each product is one of 128 columns, multiplied by both factors and added in
float32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_mtp.ops.device import device_of
from compiled_mtp.ops.k_splits import count_k_splits
from compiled_mtp.ops.linear_w8a8.config import W8A8Config, configuration, parts_dtype
from compiled_mtp.ops.linear_w8a8.keep import keep
from compiled_mtp.ops.linear_w8a8.large_m_config import find_large_m
from compiled_mtp.ops.linear_w8a8.large_m_kernel import launch_large_m
from compiled_mtp.ops.persistent_config import find_persistent
from compiled_mtp.ops.persistent_product import launch_persistent

OPTIONS = {"enable_fp_fusion": True}


@triton.jit(do_not_specialize=["rows", "scale_stride", "x_scale_stride"])
def linear_w8a8_kernel(
    x,
    x_scale,
    weight,
    weight_scale,
    out,
    rows,
    n,
    x_stride,
    weight_stride,
    x_scale_stride,
    scale_stride,
    split_length,
    BM: tl.constexpr,
    BN: tl.constexpr,
    SHARES: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
    ON_DEVICE: tl.constexpr,
):
    """One tile [BN weight rows, BM rows] over SHARES neighbouring shares of K, added as a tree."""
    # Row tiles of one weight tile are neighbours, so that all but the first find it in L2.
    row_tiles = tl.cdiv(rows, BM)
    tile = tl.program_id(0)
    row = (tile % row_tiles) * BM + tl.arange(0, BM)
    first_column = (tile // row_tiles) * BN
    column = first_column + tl.arange(0, BN)
    first_k = tl.program_id(1) * (split_length * SHARES)
    # Weight rows beyond N and rows beyond the last are read as the last one and never stored.
    weight_rows = weight + tl.minimum(column, n - 1).to(tl.int64) * weight_stride + first_k
    if PDL:
        if PREFETCH > 0:
            tl.inline_asm_elementwise(
                "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
                "=r,l,r",
                [weight_rows.to(tl.uint64, bitcast=True), tl.full((BN,), PREFETCH, tl.int32)],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
        gdc_wait()
        # The next kernel may come only now: measured, two kernels that wait crowd a third.
        gdc_launch_dependents()
    row_at = tl.minimum(row, rows - 1).to(tl.int64)
    in_k = tl.arange(0, 128)
    x_at = x + (row_at * x_stride + first_k)[None, :] + in_k[:, None]
    weight_at = weight_rows[:, None] + in_k[None, :]
    x_scale_at = x_scale + row_at * x_scale_stride + first_k // 128
    scale_at = weight_scale + first_column // 128 * scale_stride + first_k // 128
    total = tl.zeros((BN, BM), tl.float32)
    # The left halves of the tree's nodes whose right halves are yet to come: of one, two and four shares.
    one = total
    two = total
    four = total
    share = 0
    left = split_length
    # One loop over all shares: a loop for each would empty its pipeline between them.
    for at in tl.range(0, split_length * SHARES, 128, num_stages=STAGES):
        product = tl.dot(tl.load(weight_at + at), tl.load(x_at + at))
        factor = tl.load(x_scale_at + at // 128) * tl.load(scale_at + at // 128)
        total = tl.fma(product, tl.broadcast_to(factor[None, :], (BN, BM)), total)
        if SHARES > 1:
            left -= 128
            if left == 0:
                left = split_length
                if share & 1 == 0:
                    one = keep(total) if ON_DEVICE else total
                elif SHARES > 2:
                    if share & 2 == 0:
                        two = keep(one + total) if ON_DEVICE else one + total
                    elif SHARES > 4:  # noqa: SIM102  a constant and a number
                        if share & 4 == 0:
                            four = keep(two + (one + total)) if ON_DEVICE else two + (one + total)
                share += 1
                if share < SHARES:
                    total = tl.zeros((BN, BM), tl.float32)
                    if ON_DEVICE:
                        total = keep(total)
    if SHARES > 1:
        total = one + total
    if SHARES > 2:
        total = two + total
    if SHARES > 4:
        total = four + total
    to = out + tl.program_id(1).to(tl.int64) * rows * n + row.to(tl.int64)[None, :] * n + column[:, None]
    tl.store(to, total.to(out.dtype.element_ty), mask=(row < rows)[None, :] & (column < n)[:, None])


def launch(args: Any) -> torch.Tensor:
    dtype = torch.float32 if args.out_float32 else torch.bfloat16
    return launch_product(args, 1, args.x.shape[1], dtype)[0]


def launch_linear_w8a8_partials(args: Any) -> torch.Tensor:
    whole_k = args.whole_k or args.x.shape[1]
    dtype = parts_dtype(args.weight, args.count, args.whole_k, args.out_float32 or args.stacked)
    partials = launch_product(args, args.count, whole_k // count_k_splits(whole_k), dtype)
    return partials.flatten(0, 1) if args.stacked else partials


def launch_product(args: Any, count: int, split_length: int, dtype: torch.dtype) -> torch.Tensor:
    """[count, M, N] by the kernel that is faster with so many rows and possible: the same bits."""
    tensors = (args.x, args.x_scale, args.weight, args.weight_scale)
    (rows, k), n = args.x.shape, args.weight.shape[0]
    device = device_of(args.x.device.index)
    product = find_persistent(device, args.x, args.weight, count, k // (split_length * count))
    if product is not None:
        scales = {"x_scale": args.x_scale, "weight_scale": args.weight_scale}
        return launch_persistent(product, args.x, args.weight, dtype, **scales)
    tile = find_large_m(device, args.x, args.weight, count, split_length)
    if tile is not None:
        return launch_large_m(tile, *tensors, count, split_length, dtype)
    config = configuration(rows, n, count, k // (split_length * count))
    return launch_config(config, *tensors, count, split_length, dtype)


def launch_config(
    config: W8A8Config,
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    count: int,
    split_length: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """[count, M, N] of shares of `split_length` columns with a configuration given, as a tuner does."""
    (rows, k), n = x.shape, weight.shape[0]
    out = torch.empty((count, rows, n), dtype=dtype, device=x.device)
    if rows == 0 or n == 0:
        return out
    has_pdl = device_of(x.device.index).has_dependent_launch
    tiles = triton.cdiv(rows, config.block_m) * triton.cdiv(n, config.block_n)
    prefetch = min(config.prefetch_bytes, k // count) // 16 * 16 if weight.stride(0) % 16 == 0 else 0
    linear_w8a8_kernel[(tiles, count)](
        x,
        x_scale,
        weight,
        weight_scale,
        out,
        rows,
        n,
        # One row may have any stride; another value would compile another kernel.
        x.stride(0) if rows > 1 else k,
        weight.stride(0),
        x_scale.stride(0),
        weight_scale.stride(0),
        split_length,
        BM=config.block_m,
        BN=config.block_n,
        SHARES=k // (split_length * count),
        STAGES=config.num_stages,
        PREFETCH=prefetch,
        PDL=has_pdl,
        ON_DEVICE=x.is_cuda,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        launch_pdl=has_pdl,
        **OPTIONS,
    )
    return out
