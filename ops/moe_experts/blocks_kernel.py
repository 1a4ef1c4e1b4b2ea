"""The two products of grouped experts in scaled codes (ops.blocks), decoded as `blocks_triton` decodes them.

A step takes one unit of 128 columns: its values, rounded to bfloat16, 16 or 32 columns at a time. That order
holds for every tile, so a pair has the same bits in all of a round's. The shared expert is plain: its tiles
multiply the weight as it is, in the same launches.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from compiled_mtp.ops.blocks import KINDS, ROWS, UNIT
from compiled_mtp.ops.blocks_triton import MAGIC, decode_part, factor_of, load_codes, load_fields
from compiled_mtp.ops.moe_experts.grouping_kernel import OPTIONS, plan, sum_slots
from compiled_mtp.ops.moe_experts.tiles import read_tile
from compiled_mtp.ops.moe_experts.w4a16_kernel import (
    W4A16Tiles,
    add_plain,
    store_gated,
    tiles_for,
)


@triton.jit
def add_blocks(
    x_at,
    is_row,
    unit_at,
    fields_at,
    in_block,
    magic,
    total,
    KIND: tl.constexpr,
    PART: tl.constexpr,
    FIELDS: tl.constexpr,
):
    """total plus the product of 128 columns; x_at [BM, 1]: the first of them."""
    codes = load_codes(unit_at, in_block, PART, KIND)
    fields = load_fields(fields_at, in_block, FIELDS)
    for part in tl.static_range(128 // PART):
        values = decode_part(codes, fields, in_block, magic, part, PART, KIND)
        column = part * PART + tl.arange(0, PART)
        x = tl.load(x_at + column[None, :], mask=is_row[:, None], other=0.0)
        total = tl.dot(x, values, total)
    return total


@triton.jit
def times_factor(total, last_unit_at, in_block, KIND: tl.constexpr):
    """The sums times the factors of weight rows, for kinds that have them."""
    if KIND == "NVFP4":
        return total * factor_of(last_unit_at, in_block, KIND)[None, :]
    else:
        return total


@triton.jit
def gate_up_blocks_kernel(
    x,
    gate_up,
    scale,
    shared,
    tiles,
    pairs,
    hidden,
    x_stride,
    num_tiles,
    magic,
    SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    KIND: tl.constexpr,
    PART: tl.constexpr,
    FIELDS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    SCALE_UNITS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """hidden[sorted pair, inner] = silu(gate x) * up x for one tile of pairs and BN weight rows."""
    expert = tl.load(tiles + tl.program_id(1)).to(tl.int64)
    if expert < 0:
        return
    begin, lane, is_row = read_tile(tiles, num_tiles, BM)
    token = tl.load(pairs + begin + lane, mask=is_row, other=0) // SLOTS
    first = tl.program_id(0) * BN
    in_tile = tl.arange(0, BN)
    # By turns a weight row of the gate and its partner, so that a thread of the product holds both.
    row = first // 2 + in_tile // 2 + INNER * (in_tile % 2)
    x_at = x + token.to(tl.int64)[:, None] * x_stride
    total = tl.zeros((BM, BN), tl.float32)
    UNITS: tl.constexpr = WIDTH // 128
    if expert == EXPERTS:
        column = tl.arange(0, 64)
        weight_at = shared + row[None, :] * WIDTH + column[:, None]
        for start in range(0, WIDTH, 64):
            total = add_plain(x_at + (start + column)[None, :], is_row, weight_at + start, total)
    else:
        in_block = row % 16
        unit_at = gate_up + (expert * (INNER // 8) + row // 16) * (UNITS * BLOCK_WORDS)
        STEP: tl.constexpr = INNER * FIELDS
        fields_at = scale.to(tl.pointer_type(tl.int32)) + expert * (SCALE_UNITS * STEP)
        fields_at += row // 16 * (8 * FIELDS)
        for unit in range(UNITS):
            total = add_blocks(
                x_at + unit * 128,
                is_row,
                unit_at + unit * BLOCK_WORDS,
                fields_at + unit * STEP,
                in_block,
                magic,
                total,
                KIND,
                PART,
                FIELDS,
            )
        total = times_factor(total, fields_at + UNITS * STEP, in_block, KIND)
    store_gated(total, hidden, begin, is_row, first, INNER, BM, BN)


@triton.jit
def down_blocks_kernel(
    hidden,
    down,
    scale,
    shared,
    tiles,
    pairs,
    results,
    num_tiles,
    magic,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    KIND: tl.constexpr,
    PART: tl.constexpr,
    FIELDS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    SCALE_UNITS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """results[pair, width] = down hidden for one tile of pairs and BN output columns, in float32."""
    expert = tl.load(tiles + tl.program_id(1)).to(tl.int64)
    if expert < 0:
        return
    begin, lane, is_row = read_tile(tiles, num_tiles, BM)
    pair = tl.load(pairs + begin + lane, mask=is_row, other=0)
    in_tile = tl.arange(0, BN)
    column = tl.program_id(0) * BN + in_tile
    # Weight rows beyond WIDTH, a multiple of 16, are read as the first ones and never stored.
    row = tl.where(column < WIDTH, column, in_tile % 16)
    x_at = hidden + (begin + lane).to(tl.int64)[:, None] * INNER
    total = tl.zeros((BM, BN), tl.float32)
    UNITS: tl.constexpr = INNER // 128
    if expert == EXPERTS:
        inner = tl.arange(0, 64)
        weight_at = shared + row[None, :] * INNER + inner[:, None]
        for start in range(0, INNER, 64):
            total = add_plain(x_at + (start + inner)[None, :], is_row, weight_at + start, total)
    else:
        in_block = row % 16
        unit_at = down + (expert * (WIDTH // 16) + row // 16) * (UNITS * BLOCK_WORDS)
        STEP: tl.constexpr = WIDTH // 2 * FIELDS
        fields_at = scale.to(tl.pointer_type(tl.int32)) + expert * (SCALE_UNITS * STEP)
        fields_at += row // 16 * (8 * FIELDS)
        for unit in range(UNITS):
            total = add_blocks(
                x_at + unit * 128,
                is_row,
                unit_at + unit * BLOCK_WORDS,
                fields_at + unit * STEP,
                in_block,
                magic,
                total,
                KIND,
                PART,
                FIELDS,
            )
        total = times_factor(total, fields_at + UNITS * STEP, in_block, KIND)
    to = results + pair.to(tl.int64)[:, None] * WIDTH + column[None, :]
    tl.store(to, total, mask=is_row[:, None] & (column < WIDTH)[None, :])


def launch_moe_experts_blocks(args: Any) -> torch.Tensor:
    return launch_tiles(tiles_for(args.ids.numel(), len(args.gate_up), args.prefill), args)


def launch_tiles(config: W4A16Tiles, args: Any) -> torch.Tensor:
    """The result for the arguments of `moe_experts_blocks` with the tiles given, as a tuner does."""
    x, ids = args.x, args.ids
    (rows, width), inner = x.shape, args.shared_down.shape[1]
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    tiles, pairs = plan(ids, len(args.down) + 1, config.rows)
    num_tiles, num_pairs = tiles.shape[1], ids.numel()
    hidden = torch.empty((num_pairs, inner), dtype=x.dtype, device=x.device)
    results = torch.empty((num_pairs, width), dtype=torch.float32, device=x.device)
    gate_up_blocks_kernel[(2 * inner // config.gate_up_rows, num_tiles)](
        x,
        args.gate_up,
        args.gate_up_scale,
        args.shared_gate_up,
        tiles,
        pairs,
        hidden,
        x.stride(0),
        num_tiles,
        MAGIC,
        SLOTS=ids.shape[1],
        WIDTH=width,
        INNER=inner,
        BN=config.gate_up_rows,
        **_constants(config, args.gate_up, args.gate_up_scale, args.gate_up_kind),
    )
    down_blocks_kernel[(triton.cdiv(width, config.down_rows), num_tiles)](
        hidden,
        args.down,
        args.down_scale,
        args.shared_down,
        tiles,
        pairs,
        results,
        num_tiles,
        MAGIC,
        WIDTH=width,
        INNER=inner,
        BN=config.down_rows,
        **_constants(config, args.down, args.down_scale, args.down_kind),
    )
    sum_slots(results, args.weights, out)
    return out


def _constants(config: W4A16Tiles, weight: torch.Tensor, scale: torch.Tensor, kind: str) -> dict[str, Any]:
    """What both products are compiled for."""
    form = KINDS[kind]
    assert weight.shape[2] == form.words * (form.columns(weight.shape[2]) // UNIT)
    return {
        "KIND": kind,
        "PART": form.width,
        "FIELDS": form.fields,
        "BLOCK_WORDS": ROWS * form.words,
        "SCALE_UNITS": scale.shape[1],
        "EXPERTS": len(weight),
        "BM": config.rows,
        "num_warps": config.warps,
        "num_stages": config.stages,
        **OPTIONS,
    }
