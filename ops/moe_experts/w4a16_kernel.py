"""The two products of grouped experts with four-bit weights, decoded as `linear_w4a16` decodes them.

A step takes one unit of 128 columns (ops.int4). The products of a group's columns are summed in a tensor
core, multiplied by the scale in float32 and added to the total. That order holds for every tile, so a pair
has the same bits in all of a round's tiles. The shared expert may be plain: its tiles then multiply the
weight as it is, in the same launches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from compiled_mtp.ops.int4 import UNIT
from compiled_mtp.ops.int4_triton import add_unit, load_unit
from compiled_mtp.ops.moe_experts.grouping_kernel import OPTIONS, plan, sum_slots
from compiled_mtp.ops.moe_experts.tiles import read_tile

# Pairs an expert has on average, from which on tiles of 32 are fuller than they are wasteful.
TALL_PAIRS = 16


@triton.jit
def add_plain(x_at, is_row, weight_at, total):
    """total plus the product of 64 columns with plain weights [64, BN]."""
    values = tl.load(x_at, mask=is_row[:, None], other=0.0)
    return tl.dot(values, tl.load(weight_at), total)


@triton.jit
def store_gated(
    total, hidden, first_row, is_row, first, INNER: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """Store silu(gate) * up of a tile [BM, BN], whose columns are gate and up by turns."""
    gate, up = tl.split(tl.reshape(total, (BM, BN // 2, 2)))
    result = gate / (1.0 + tl.exp(-gate)) * up
    inner = first // 2 + tl.arange(0, BN // 2)
    to = hidden + (first_row + tl.arange(0, BM)).to(tl.int64)[:, None] * INNER + inner[None, :]
    tl.store(to, result.to(hidden.dtype.element_ty), mask=is_row[:, None])


@triton.jit
def gate_up_w4a16_kernel(
    x,
    gate_up,
    scale,
    shared,
    tiles,
    pairs,
    hidden,
    x_stride,
    num_tiles,
    SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    PER_UNIT: tl.constexpr,
    EXPERTS: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    ON_DEVICE: tl.constexpr,
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
    if HAS_SHARED and expert == EXPERTS:
        column = tl.arange(0, 64)
        weight_at = shared + row[None, :] * WIDTH + column[:, None]
        for start in range(0, WIDTH, 64):
            total = add_plain(x_at + (start + column)[None, :], is_row, weight_at + start, total)
    else:
        word = tl.arange(0, 32)
        words_at = gate_up + expert * (2 * INNER * WIDTH // 4)
        words_at += (row // 16 * (4 * WIDTH) + row % 16 * 32)[None, :] + word[:, None]
        group_at = scale.to(tl.pointer_type(tl.int32)) + expert * (2 * INNER * WIDTH // 128 * PER_UNIT) + row
        for unit in range(WIDTH // 128):
            values, groups = load_unit(
                words_at + unit * 512,
                group_at + unit * (PER_UNIT * 2 * INNER),
                2 * INNER,
                PER_UNIT,
                ON_DEVICE,
            )
            total = add_unit(
                x_at + (unit * 128 + word)[None, :],
                is_row[:, None],
                values,
                groups,
                total,
                PER_UNIT,
                scale.dtype.element_ty,
            )
    store_gated(total, hidden, begin, is_row, first, INNER, BM, BN)


@triton.jit
def down_w4a16_kernel(
    hidden,
    down,
    scale,
    shared,
    tiles,
    pairs,
    results,
    num_tiles,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    PER_UNIT: tl.constexpr,
    EXPERTS: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    ON_DEVICE: tl.constexpr,
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
    if HAS_SHARED and expert == EXPERTS:
        inner = tl.arange(0, 64)
        weight_at = shared + row[None, :] * INNER + inner[:, None]
        for start in range(0, INNER, 64):
            total = add_plain(x_at + (start + inner)[None, :], is_row, weight_at + start, total)
    else:
        word = tl.arange(0, 32)
        words_at = down + expert * (WIDTH * INNER // 4)
        words_at += (row // 16 * (4 * INNER) + row % 16 * 32)[None, :] + word[:, None]
        group_at = scale.to(tl.pointer_type(tl.int32)) + expert * (WIDTH * INNER // 128 * PER_UNIT) + row
        for unit in range(INNER // 128):
            values, groups = load_unit(
                words_at + unit * 512, group_at + unit * (PER_UNIT * WIDTH), WIDTH, PER_UNIT, ON_DEVICE
            )
            total = add_unit(
                x_at + (unit * 128 + word)[None, :],
                is_row[:, None],
                values,
                groups,
                total,
                PER_UNIT,
                scale.dtype.element_ty,
            )
    to = results + pair.to(tl.int64)[:, None] * WIDTH + column[None, :]
    tl.store(to, total, mask=is_row[:, None] & (column < WIDTH)[None, :])


@dataclass(frozen=True)
class W4A16Tiles:
    """Tile shapes of the two products.

    rows: pairs of a tile. gate_up_rows, down_rows: weight rows of a tile, powers of two; gate and up count.
    """

    rows: int
    gate_up_rows: int
    down_rows: int
    warps: int
    stages: int


PROMPT_TILES = W4A16Tiles(64, 128, 128, 8, 3)


def tiles_for(num_pairs: int, experts: int, prefill: bool) -> W4A16Tiles:
    """The tiles of `num_pairs` pairs of `experts` experts. No tile of a round gives a pair other bits."""
    if prefill:
        return PROMPT_TILES
    if num_pairs >= TALL_PAIRS * experts:
        return W4A16Tiles(32, 128, 128, 4, 3)
    return W4A16Tiles(16, 64, 64, 2, 4)


def launch_moe_experts_w4a16(args: Any) -> torch.Tensor:
    return launch_tiles(tiles_for(args.ids.numel(), len(args.gate_up), args.prefill), args)


def launch_tiles(config: W4A16Tiles, args: Any) -> torch.Tensor:
    """The result for the arguments of `moe_experts_w4a16` with the tiles given, as a tuner does."""
    x, weights, ids, down = args.x, args.weights, args.ids, args.down
    (rows, width), inner = x.shape, down.shape[2] * 4
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    experts = len(down) + (args.shared_down is not None)
    table = plan(ids, experts, config.rows)
    hidden = torch.empty((ids.numel(), inner), dtype=x.dtype, device=x.device)
    results = torch.empty((ids.numel(), width), dtype=torch.float32, device=x.device)
    stack = (args.gate_up, args.gate_up_scale, args.shared_gate_up)
    multiply_gate_up(config, x, *stack, *table, hidden, ids.shape[1])
    multiply_down(config, hidden, down, args.down_scale, args.shared_down, *table, results)
    sum_slots(results, weights, out)
    return out


def launch_moe_hidden_w4a16(args: Any) -> torch.Tensor:
    x, ids, (_, both, _) = args.x, args.ids, args.gate_up.shape
    hidden = torch.empty((ids.numel(), both // 2), dtype=x.dtype, device=x.device)
    if ids.numel():
        tiles = tiles_for(ids.numel(), len(args.gate_up), args.prefill)
        table = plan(ids, len(args.gate_up) + (args.shared_gate_up is not None), tiles.rows)
        stack = (args.gate_up, args.gate_up_scale, args.shared_gate_up)
        multiply_gate_up(tiles, x, *stack, *table, hidden, ids.shape[1])
    return hidden


def launch_moe_sums_w4a16(args: Any) -> torch.Tensor:
    hidden, ids, (_, width, _) = args.hidden, args.ids, args.down.shape
    out = torch.empty((len(ids), width), dtype=hidden.dtype, device=hidden.device)
    if ids.numel():
        tiles = tiles_for(ids.numel(), len(args.down), args.prefill)
        table = plan(ids, len(args.down) + (args.shared_down is not None), tiles.rows)
        results = torch.empty((ids.numel(), width), dtype=torch.float32, device=hidden.device)
        multiply_down(tiles, hidden, args.down, args.down_scale, args.shared_down, *table, results)
        sum_slots(results, args.weights, out)
    return out


def shared_constants(
    config: W4A16Tiles, weight: torch.Tensor, scale: torch.Tensor, shared: torch.Tensor | None
) -> dict[str, Any]:
    """What both products are compiled for."""
    return {
        "PER_UNIT": scale.shape[1] * UNIT // (weight.shape[2] * 4),
        "EXPERTS": len(weight),
        "HAS_SHARED": shared is not None,
        "BM": config.rows,
        "ON_DEVICE": weight.is_cuda,
        "num_warps": config.warps,
        "num_stages": config.stages,
        **OPTIONS,
    }


def multiply_gate_up(
    config: W4A16Tiles,
    x: torch.Tensor,
    gate_up: torch.Tensor,
    scale: torch.Tensor,
    shared: torch.Tensor | None,
    tiles: torch.Tensor,
    pairs: torch.Tensor,
    hidden: torch.Tensor,
    slots: int,
) -> None:
    """Write `hidden` [M * slots, I], pairs sorted by expert as `plan` has them."""
    inner, num_tiles = hidden.shape[1], tiles.shape[1]
    gate_up_w4a16_kernel[(2 * inner // config.gate_up_rows, num_tiles)](
        x,
        gate_up,
        scale,
        x if shared is None else shared,
        tiles,
        pairs,
        hidden,
        x.stride(0),
        num_tiles,
        SLOTS=slots,
        WIDTH=x.shape[1],
        INNER=inner,
        BN=config.gate_up_rows,
        **shared_constants(config, gate_up, scale, shared),
    )


def multiply_down(
    config: W4A16Tiles,
    hidden: torch.Tensor,
    down: torch.Tensor,
    scale: torch.Tensor,
    shared: torch.Tensor | None,
    tiles: torch.Tensor,
    pairs: torch.Tensor,
    results: torch.Tensor,
) -> None:
    """Write `results` [M * slots, N] of `hidden`, pairs in their own order."""
    width, inner, num_tiles = results.shape[1], hidden.shape[1], tiles.shape[1]
    down_w4a16_kernel[(triton.cdiv(width, config.down_rows), num_tiles)](
        hidden,
        down,
        scale,
        hidden if shared is None else shared,
        tiles,
        pairs,
        results,
        num_tiles,
        WIDTH=width,
        INNER=inner,
        BN=config.down_rows,
        **shared_constants(config, down, scale, shared),
    )
