"""The two products of grouped experts in FP8: the weight is the left operand, whatever the number of pairs.

So one class of instruction, QGMMA, serves a tile of 16 pairs and one of 64 (see linear_w8a8): a pair's bits
depend on nothing beside it. Each product is one of 128 columns, multiplied by both factors and added in
float32. The hidden values of 128 columns are one group, which the program that makes them quantises.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_mtp.ops.fp8_triton import quantize_groups
from compiled_mtp.ops.moe_experts.tiles import find_pairs


@triton.jit
def scaled_product(total, weight, values, scale, value_scale):
    """total + weight [BN, 128] @ values [128, BM], times the weight's factor and those of the columns."""
    product = tl.dot(weight, values)
    factor = tl.broadcast_to((value_scale * scale)[None, :], (total.shape[0], total.shape[1]))
    return tl.fma(product, factor, total)


@triton.jit(do_not_specialize=["rows", "num_tiles"])
def gate_up_w8a8_kernel(
    x,
    x_scale,
    gate_up,
    scale,
    ids,
    tiles,
    pairs,
    hidden,
    hidden_scale,
    rows,
    x_stride,
    x_scale_stride,
    num_tiles,
    SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
    BM: tl.constexpr,
    PDL: tl.constexpr,
):
    """hidden[sorted pair, 128 inner columns] = silu(gate x) * up x for one tile of pairs, quantised."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert, pair, place, is_row = find_pairs(ids, tiles, pairs, rows, num_tiles, SLOTS, BM)
    if expert < 0:
        return
    token = (pair // SLOTS).to(tl.int64)
    group = tl.program_id(0)
    in_group = tl.arange(0, 128)
    weight_at = gate_up + expert * (2 * INNER * WIDTH) + (group * 128 + in_group)[:, None] * WIDTH
    weight_at += in_group[None, :]
    scale_at = scale + (expert * (2 * INNER // 128) + group) * (WIDTH // 128)
    x_at = x + (token * x_stride)[None, :] + in_group[:, None]
    x_scale_at = x_scale + token * x_scale_stride
    gate = tl.zeros((128, BM), tl.float32)
    up = tl.zeros((128, BM), tl.float32)
    for block in range(WIDTH // 128):
        values = tl.load(x_at + block * 128)
        value_scale = tl.load(x_scale_at + block)
        weight = tl.load(weight_at + block * 128)
        gate = scaled_product(gate, weight, values, tl.load(scale_at + block), value_scale)
        weight = tl.load(weight_at + INNER * WIDTH + block * 128)
        up_scale = tl.load(scale_at + INNER // 128 * (WIDTH // 128) + block)
        up = scaled_product(up, weight, values, up_scale, value_scale)
    result = gate / (1.0 + tl.exp(-gate)) * up
    if not IN_FLOAT32:
        result = result.to(tl.bfloat16).to(tl.float32)
    quantized, factors = quantize_groups(result, 0)
    row = place.to(tl.int64)
    to = hidden + row[None, :] * INNER + (group * 128 + in_group)[:, None]
    tl.store(to, quantized, mask=is_row[None, :])
    tl.store(hidden_scale + row * (INNER // 128) + group, factors, mask=is_row)


@triton.jit(do_not_specialize=["rows", "num_tiles"])
def down_w8a8_kernel(
    hidden,
    hidden_scale,
    down,
    scale,
    ids,
    tiles,
    pairs,
    results,
    rows,
    num_tiles,
    SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    BM: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """results[pair, 128 columns] = down hidden for one tile of pairs, in float32; EARLY: see down_kernel."""
    if PDL and not EARLY:
        gdc_wait()
    expert, pair, place, is_row = find_pairs(ids, tiles, pairs, rows, num_tiles, SLOTS, BM)
    if expert < 0:
        if PDL:
            gdc_wait()
        return
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = place.to(tl.int64)
    group = tl.program_id(0)
    in_group = tl.arange(0, 128)
    weight_at = down + expert * (WIDTH * INNER) + (group * 128 + in_group)[:, None] * INNER
    weight_at += in_group[None, :]
    scale_at = scale + (expert * (WIDTH // 128) + group) * (INNER // 128)
    hidden_at = hidden + (row * INNER)[None, :] + in_group[:, None]
    hidden_scale_at = hidden_scale + row * (INNER // 128)
    total = tl.zeros((128, BM), tl.float32)
    for block in range(INNER // 128):
        values = tl.load(hidden_at + block * 128)
        value_scale = tl.load(hidden_scale_at + block)
        weight = tl.load(weight_at + block * 128)
        total = scaled_product(total, weight, values, tl.load(scale_at + block), value_scale)
    to = results + (pair.to(tl.int64) * WIDTH)[None, :] + (group * 128 + in_group)[:, None]
    tl.store(to, total, mask=is_row[None, :])
