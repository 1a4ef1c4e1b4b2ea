"""Query and key norm, rotary embedding and page write: a program of one warp takes some heads of a row."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_mtp.ops.device import device_of

# No fused multiply-add, as in the reference.
FUSION = {"enable_fp_fusion": False}
# Rows from which on a program takes two or four heads: with one each, more programs than a GPU runs at once
# would load the same cursors and angles, and wait for them.
LEAST_ROWS_OF_TWO, LEAST_ROWS_OF_FOUR = 32, 256


@triton.jit
def partner_of(dim, ROT: tl.constexpr):
    """Return the dimension that each one is rotated with; the dimension itself beyond the rotated ones."""
    HALF: tl.constexpr = ROT // 2
    return tl.where(dim < ROT, tl.where(dim < HALF, dim + HALF, dim - HALF), dim)


@triton.jit
def norm_rope(values, others, factor, other_factor, cos, sin, eps, HD: tl.constexpr, ROT: tl.constexpr):
    """Normalise and rotate one head; each lane also normalises the dimension that its own is rotated with."""
    HALF: tl.constexpr = ROT // 2
    dim = tl.arange(0, values.shape[0])
    is_turned = dim < ROT
    inverse = tl.rsqrt(tl.sum(values * values, 0) / HD + eps)
    values = values * inverse * factor
    others = others * inverse * other_factor
    turned = values * cos + tl.where(dim < HALF, -others, others) * sin
    return tl.where(is_turned, turned, values)


@triton.jit
def qk_norm_rope_kv_write_kernel(
    qkv,
    q_weight,
    k_weight,
    cos_sin,
    positions,
    slot_mapping,
    kv,
    kv_scale,
    out,
    qkv_stride,
    cos_stride,
    block_stride,
    half_stride,
    head_stride,
    token_stride,
    scale_block_stride,
    scale_half_stride,
    scale_head_stride,
    block_size,
    eps,
    HEADS: tl.constexpr,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    HD: tl.constexpr,
    ROT: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_AXES: tl.constexpr,
    ROW_END: tl.constexpr,
    COLUMN_END: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    first_head = tl.program_id(1) * HEADS
    dim = tl.arange(0, BLOCK)
    inside = dim < HD
    partner = partner_of(dim, ROT)
    # Load weights, angles and cursors while the kernel before this one finishes: no kernel writes weights and
    # angles, and the cursors are older than the projection.
    weight = q_weight if first_head < HQ else k_weight
    factor = 1.0 + tl.load(weight + dim, mask=inside, other=0.0).to(tl.float32)
    other_factor = 1.0 + tl.load(weight + partner, mask=inside, other=0.0).to(tl.float32)
    HALF: tl.constexpr = ROT // 2
    if HAS_AXES:
        frequency = dim % HALF
        is_row = (frequency % 3 == 1) & (frequency < ROW_END)
        is_column = (frequency % 3 == 2) & (frequency < COLUMN_END)
        axis = tl.where(is_row, 1, tl.where(is_column, 2, 0)).to(tl.int64)
        position = tl.load(positions + axis * tl.num_programs(0) + row)
    else:
        position = tl.load(positions + row)
    slot = tl.load(slot_mapping + row)
    angle = cos_sin + position * cos_stride + dim % HALF
    cos = tl.load(angle, mask=dim < ROT, other=1.0)
    sin = tl.load(angle + HALF, mask=dim < ROT, other=0.0)
    if PDL:
        gdc_wait()
    # Query heads are stored with their gates, twice as wide as the keys and values after them.
    loaded = ()
    for index in tl.static_range(HEADS):
        head = first_head + index
        x = qkv + row * qkv_stride + (head + tl.minimum(head, HQ)) * HD
        loaded += ((tl.load(x + dim, mask=inside, other=0.0), tl.load(x + partner, mask=inside, other=0.0)),)
    for index in tl.static_range(HEADS):
        head = first_head + index
        values = loaded[index][0].to(tl.float32)
        others = loaded[index][1].to(tl.float32)
        if head < HQ:
            y = norm_rope(values, others, factor, other_factor, cos, sin, eps, HD, ROT)
            tl.store(out + (row * HQ + head) * HD + dim, y.to(out.dtype.element_ty), mask=inside)
        else:
            if slot >= 0:
                half = (head - HQ) // HKV
                kv_head = (head - HQ) % HKV
                if half == 0:
                    y = norm_rope(values, others, factor, other_factor, cos, sin, eps, HD, ROT)
                else:
                    y = values
                block = slot // block_size
                offset = slot % block_size
                if HAS_SCALE:
                    scale = tl.max(tl.abs(y), 0) / 448.0
                    y = tl.div_rn(y, tl.where(scale == 0.0, 1.0, scale))
                    y = tl.minimum(tl.maximum(y, -448.0), 448.0)
                    at = block * scale_block_stride + half * scale_half_stride + kv_head * scale_head_stride
                    tl.store(kv_scale + at + offset, scale)
                at = block * block_stride + half * half_stride + kv_head * head_stride + offset * token_stride
                tl.store(kv + at + dim, y.to(kv.dtype.element_ty), mask=inside)


def heads_of_program(rows: int, num_q_heads: int, num_kv_heads: int) -> int:
    """Return how many heads a program takes, all of queries or none; no bit depends on it."""
    heads = 1 if rows < LEAST_ROWS_OF_TWO else 2 if rows < LEAST_ROWS_OF_FOUR else 4
    while num_q_heads % heads or 2 * num_kv_heads % heads:
        heads //= 2
    return heads


def launch(args: Any) -> torch.Tensor:
    qkv, cos_sin, kv, kv_scale = args.qkv, args.cos_sin, args.kv, args.kv_scale
    num_q_heads = args.num_q_heads
    rows, hd = qkv.shape[0], kv.shape[4]
    out = torch.empty((rows, num_q_heads, hd), dtype=qkv.dtype, device=qkv.device)
    if rows == 0:
        return out
    has_pdl = device_of(qkv.device.index).has_dependent_launch
    heads = heads_of_program(rows, num_q_heads, args.num_kv_heads)
    scale_strides = (0, 0, 0) if kv_scale is None else kv_scale.stride()[:3]
    qk_norm_rope_kv_write_kernel[(rows, (num_q_heads + 2 * args.num_kv_heads) // heads)](
        qkv,
        args.q_weight,
        args.k_weight,
        cos_sin,
        args.positions,
        args.slot_mapping,
        kv,
        kv if kv_scale is None else kv_scale,
        out,
        qkv.stride(0),
        cos_sin.stride(0),
        *kv.stride()[:4],
        *scale_strides,
        kv.shape[3],
        args.eps,
        HEADS=heads,
        HQ=num_q_heads,
        HKV=args.num_kv_heads,
        HD=hd,
        ROT=cos_sin.shape[1],
        BLOCK=triton.next_power_of_2(hd),
        HAS_SCALE=kv_scale is not None,
        HAS_AXES=args.positions.dim() == 2,
        ROW_END=args.row_end,
        COLUMN_END=args.column_end,
        PDL=has_pdl,
        launch_pdl=has_pdl,
        num_warps=1,
        **FUSION,
    )
    return out
