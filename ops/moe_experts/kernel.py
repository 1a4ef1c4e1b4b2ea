"""Grouped experts in four launches: tile table, gate|up with silu-mul, down, weighted sum in slot order.

A tile is up to `tile_rows` (row, slot) pairs of one expert, so that few tiles read the same weights. Grids
have the size of the worst case and surplus programs leave at once: no count reaches the host. Up to 16 rows
need no table (`find_pairs`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_mtp.ops.device import device_of
from compiled_mtp.ops.moe_experts.codes import launch_moe_experts_blocks as launch_moe_experts_blocks
from compiled_mtp.ops.moe_experts.codes import launch_moe_experts_w4a16 as launch_moe_experts_w4a16
from compiled_mtp.ops.moe_experts.codes import launch_moe_hidden_w4a16 as launch_moe_hidden_w4a16
from compiled_mtp.ops.moe_experts.codes import launch_moe_sums_w4a16 as launch_moe_sums_w4a16
from compiled_mtp.ops.moe_experts.grouping_kernel import Table, launch_options, plan, sum_slots, table_of
from compiled_mtp.ops.moe_experts.tiles import find_pairs
from compiled_mtp.ops.moe_experts.w8a8_kernel import down_w8a8_kernel, gate_up_w8a8_kernel

# Pairs an expert has on average, from which on taller tiles are faster.
TALL_PAIRS = 16


@triton.jit
def widen(w, dtype: tl.constexpr, USE_ASM: tl.constexpr):
    """The exact values of e4m3 codes (uint8); with USE_ASM, which the interpreter lacks, for bfloat16.

    A code's 7 low bits, moved into a bfloat16, mean 2^-120 of its value, subnormal codes included. That takes
    two and a half instructions an element; the conversion instruction runs at an eighth of their rate. The
    code of NaN becomes 480: no checkpoint holds one.
    """
    if USE_ASM and dtype == tl.bfloat16:
        result = tl.inline_asm_elementwise(
            """
            {
                .reg .b32 low, high, sign, scale, zero;
                mov.b32 scale, 0x7B807B80;
                mov.b32 zero, 0x80008000;
                prmt.b32 low, $2, 0, 0x1404;
                prmt.b32 high, $2, 0, 0x3424;
                and.b32 sign, low, 0x80008000;
                shr.b32 low, low, 4;
                and.b32 low, low, 0x07F007F0;
                or.b32 low, low, sign;
                and.b32 sign, high, 0x80008000;
                shr.b32 high, high, 4;
                and.b32 high, high, 0x07F007F0;
                or.b32 high, high, sign;
                fma.rn.bf16x2 $0, low, scale, zero;
                fma.rn.bf16x2 $1, high, scale, zero;
            }
            """,
            "=r,=r,r",
            [w],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    else:
        result = w.to(tl.float8e4nv, bitcast=True).to(dtype)
    return result


@triton.jit
def load_weight(weight, rows, k, num_rows: tl.constexpr, num_k: tl.constexpr, EVEN: tl.constexpr):
    """A tile [len(rows), len(k)] of one expert's matrix."""
    at = weight + rows[:, None] * num_k + k[None, :]
    if EVEN:
        return tl.load(at)
    return tl.load(at, mask=(rows < num_rows)[:, None] & (k < num_k)[None, :], other=0.0)


@triton.jit
def load_values(rows, k, is_row, num_k: tl.constexpr, EVEN: tl.constexpr):
    """A tile [len(rows), len(k)] of activations, zero where there is no row."""
    if EVEN:
        return tl.load(rows[:, None] + k[None, :], mask=is_row[:, None], other=0.0)
    return tl.load(rows[:, None] + k[None, :], mask=is_row[:, None] & (k < num_k)[None, :], other=0.0)


@triton.jit
def scale_pointers(scale, expert, rows, num_rows: tl.constexpr, num_k: tl.constexpr):
    """Where the scales of the first 128 columns of an expert's `rows` lie; the next 128 are one further."""
    columns: tl.constexpr = (num_k + 127) // 128
    return scale + expert * (((num_rows + 127) // 128) * columns) + (rows // 128) * columns


@triton.jit(do_not_specialize=["rows", "num_tiles"])
def gate_up_kernel(
    x,
    gate_up,
    scale,
    ids,
    tiles,
    pairs,
    hidden,
    rows,
    x_stride,
    num_tiles,
    SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    IS_FP8: tl.constexpr,
    USE_ASM: tl.constexpr,
    EVEN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    """hidden[sorted pair, inner] = silu(gate x) * up x for one tile of pairs and BN inner columns."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert, pair, place, is_row = find_pairs(ids, tiles, pairs, rows, num_tiles, SLOTS, BM)
    if expert < 0:
        return
    x_at = x + (pair // SLOTS).to(tl.int64) * x_stride
    inner = tl.program_id(0) * BN + tl.arange(0, BN)
    weight = gate_up + expert * (2 * INNER * WIDTH)
    if IS_FP8:
        gate_scale = scale_pointers(scale, expert, inner, 2 * INNER, WIDTH)
        up_scale = scale_pointers(scale, expert, inner + INNER, 2 * INNER, WIDTH)
    gate = tl.zeros((BM, BN), tl.float32)
    up = tl.zeros((BM, BN), tl.float32)
    for start in range(0, WIDTH, BK):
        k = start + tl.arange(0, BK)
        values = load_values(x_at, k, is_row, WIDTH, EVEN)
        w_gate = load_weight(weight, inner, k, INNER, WIDTH, EVEN)
        w_up = load_weight(weight + INNER * WIDTH, inner, k, INNER, WIDTH, EVEN)
        if IS_FP8:
            part = tl.dot(values, tl.trans(widen(w_gate, values.dtype, USE_ASM)), input_precision="ieee")
            gate += part * tl.load(gate_scale + start // 128, mask=inner < INNER, other=0.0)[None, :]
            part = tl.dot(values, tl.trans(widen(w_up, values.dtype, USE_ASM)), input_precision="ieee")
            up += part * tl.load(up_scale + start // 128, mask=inner < INNER, other=0.0)[None, :]
        else:
            gate = tl.dot(values, tl.trans(w_gate), gate, input_precision="ieee")
            up = tl.dot(values, tl.trans(w_up), up, input_precision="ieee")
    result = gate / (1.0 + tl.exp(-gate)) * up
    to = hidden + place.to(tl.int64)[:, None] * INNER + inner[None, :]
    tl.store(to, result.to(hidden.dtype.element_ty), mask=is_row[:, None] & (inner < INNER)[None, :])


@triton.jit(do_not_specialize=["rows", "num_tiles"])
def down_kernel(
    hidden,
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
    IS_FP8: tl.constexpr,
    USE_ASM: tl.constexpr,
    EVEN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """results[pair, width] = down hidden for one tile of pairs and BN output columns, in float32.

    EARLY: the kernel before is that of gate and up, which has waited for ids, tiles and pairs.
    """
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
    hidden_at = hidden + place.to(tl.int64) * INNER
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    weight = down + expert * (WIDTH * INNER)
    if IS_FP8:
        row_scale = scale_pointers(scale, expert, column, WIDTH, INNER)
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, INNER, BK):
        k = start + tl.arange(0, BK)
        values = load_values(hidden_at, k, is_row, INNER, EVEN)
        w = load_weight(weight, column, k, WIDTH, INNER, EVEN)
        if IS_FP8:
            part = tl.dot(values, tl.trans(widen(w, values.dtype, USE_ASM)), input_precision="ieee")
            total += part * tl.load(row_scale + start // 128, mask=column < WIDTH, other=0.0)[None, :]
        else:
            total = tl.dot(values, tl.trans(w), total, input_precision="ieee")
    to = results + pair.to(tl.int64)[:, None] * WIDTH + column[None, :]
    tl.store(to, total, mask=is_row[:, None] & (column < WIDTH)[None, :])


@dataclass(frozen=True)
class Configuration:
    """Tile shapes of the two products; functions of the model and of decode or prefill alone."""

    tile_rows: int
    gate_up_columns: int
    down_columns: int
    max_k: int
    stages: int
    warps: int = 4

    def k_tile(self, length: int) -> int:
        return max(16, min(self.max_k, triton.next_power_of_2(length)))


PROMPT_TILES = Configuration(64, 64, 128, 64, 3)


def configuration(
    dtype: torch.dtype, is_fp8: bool, prefill: bool, is_tall: bool = False, arch: str = "sm_90"
) -> Configuration:
    """The tiles of a launch; is_tall: experts have TALL_PAIRS pairs and more on average.

    No pair of a round has other bits in taller bfloat16 tiles (tests/gpu/test_moe.py): the two classes of
    instruction of Hopper's tensor cores add products alike. Blackwell's were not compared: its tiles stay
    within one class. The others have one height for all numbers of rows.
    """
    if dtype == torch.float32:
        return Configuration(16, 32, 32, 128 if is_fp8 else 32, 2)
    if is_fp8:
        return Configuration(64, 64, 64, 128, 3) if prefill else Configuration(16, 64, 64, 128, 3)
    if is_tall and not prefill and arch.startswith("sm_10"):
        return Configuration(32, 64, 128, 64, 4)
    return PROMPT_TILES if prefill or is_tall else Configuration(16, 32, 64, 128, 3)


def configuration_of(
    x: torch.Tensor, ids: torch.Tensor, experts: int, scale: torch.Tensor | None, prefill: bool
) -> Configuration:
    is_tall = ids.numel() >= TALL_PAIRS * experts
    return configuration(x.dtype, scale is not None, prefill, is_tall, device_of(x.device.index).arch)


def is_even(config: Configuration, width: int, inner: int) -> bool:
    """Whether no tile of a weight reaches over an edge."""
    return not (
        width % config.k_tile(width)
        or inner % config.k_tile(inner)
        or inner % config.gate_up_columns
        or width % config.down_columns
    )


def launch(args: Any) -> torch.Tensor:
    x, ids = args.x, args.ids
    experts, width, inner = args.down.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if ids.numel():
        config = configuration_of(x, ids, experts, args.gate_up_scale, args.prefill)
        table = table_of(ids, experts, config.tile_rows)
        hidden = torch.empty((ids.numel(), inner), dtype=x.dtype, device=x.device)
        results = torch.empty((ids.numel(), width), dtype=torch.float32, device=x.device)
        multiply_gate_up(config, x, args.gate_up, args.gate_up_scale, table, hidden)
        multiply_down(config, hidden, args.down, args.down_scale, table, results, early=True)
        sum_slots(results, args.weights, out)
    return out


def shared_constants(
    config: Configuration, x: torch.Tensor, width: int, inner: int, is_fp8: bool
) -> dict[str, Any]:
    """What both products of experts of `inner` hidden columns are compiled for."""
    return {
        "WIDTH": width,
        "INNER": inner,
        "IS_FP8": is_fp8,
        "USE_ASM": x.is_cuda,
        "EVEN": is_even(config, width, inner),
        "BM": config.tile_rows,
        "num_warps": config.warps,
        "num_stages": config.stages,
        **launch_options(x),
    }


def multiply_gate_up(
    config: Configuration,
    x: torch.Tensor,
    gate_up: torch.Tensor,
    scale: torch.Tensor | None,
    table: Table,
    hidden: torch.Tensor,
) -> None:
    """Write `hidden` [M * slots, I], pairs in the table's order."""
    width, inner = x.shape[1], hidden.shape[1]
    gate_up_kernel[(triton.cdiv(inner, config.gate_up_columns), table.entries)](
        x,
        gate_up if scale is None else gate_up.view(torch.uint8),
        gate_up if scale is None else scale,
        *table,
        hidden,
        len(x),
        x.stride(0),
        table.entries,
        SLOTS=table.ids.shape[1],
        BN=config.gate_up_columns,
        BK=config.k_tile(width),
        **shared_constants(config, x, width, inner, scale is not None),
    )


def multiply_down(
    config: Configuration,
    hidden: torch.Tensor,
    down: torch.Tensor,
    scale: torch.Tensor | None,
    table: Table,
    results: torch.Tensor,
    early: bool,
) -> None:
    """Write `results` [M * slots, N] of `hidden`, pairs in their own order.

    early: gate and up of the same table were the launch before.
    """
    width, inner = results.shape[1], hidden.shape[1]
    down_kernel[(triton.cdiv(width, config.down_columns), table.entries)](
        hidden,
        down if scale is None else down.view(torch.uint8),
        down if scale is None else scale,
        *table,
        results,
        len(table.ids),
        table.entries,
        SLOTS=table.ids.shape[1],
        EARLY=early,
        BN=config.down_columns,
        BK=config.k_tile(inner),
        **shared_constants(config, hidden, width, inner, scale is not None),
    )


def launch_moe_experts_w8a8(args: Any) -> torch.Tensor:
    x, ids = args.x, args.ids
    (rows, width), num_pairs = x.shape, ids.numel()
    experts, _, inner = args.down.shape
    dtype = torch.float32 if args.out_float32 else torch.bfloat16
    out = torch.empty((rows, width), dtype=dtype, device=x.device)
    if rows == 0:
        return out
    tile_rows = w8a8_tile_rows(num_pairs, experts)
    table = (tile_rows, table_of(ids, experts, tile_rows))
    hidden = torch.empty((num_pairs, inner), dtype=x.dtype, device=x.device)
    hidden_scale = torch.empty((num_pairs, inner // 128), dtype=torch.float32, device=x.device)
    results = torch.empty((num_pairs, width), dtype=torch.float32, device=x.device)
    rows_of_x, stack = (x, args.x_scale), (args.gate_up, args.gate_up_scale)
    multiply_gate_up_w8a8(*rows_of_x, *stack, *table, hidden, hidden_scale, args.out_float32)
    multiply_down_w8a8(hidden, hidden_scale, args.down, args.down_scale, *table, results, early=True)
    sum_slots(results, args.weights, out)
    return out


def w8a8_tile_rows(num_pairs: int, experts: int) -> int:
    """The pairs of a tile. Neither height gives a pair other bits."""
    return 64 if num_pairs >= TALL_PAIRS * experts else 16


def w8a8_constants(x: torch.Tensor, width: int, inner: int, tile_rows: int) -> dict[str, Any]:
    """What both products of quantised rows are compiled for."""
    return {
        "WIDTH": width,
        "INNER": inner,
        "BM": tile_rows,
        "num_warps": 4 if tile_rows == 16 else 8,
        "num_stages": 3,
        **launch_options(x),
    }


def multiply_gate_up_w8a8(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    gate_up: torch.Tensor,
    scale: torch.Tensor,
    tile_rows: int,
    table: Table,
    hidden: torch.Tensor,
    hidden_scale: torch.Tensor,
    in_float32: bool,
) -> None:
    """Write `hidden` [M * slots, I] and its factors, pairs in the table's order."""
    width, inner = x.shape[1], hidden.shape[1]
    gate_up_w8a8_kernel[(inner // 128, table.entries)](
        x,
        x_scale,
        gate_up,
        scale,
        *table,
        hidden,
        hidden_scale,
        len(x),
        x.stride(0),
        x_scale.stride(0),
        table.entries,
        SLOTS=table.ids.shape[1],
        IN_FLOAT32=in_float32,
        **w8a8_constants(x, width, inner, tile_rows),
    )


def multiply_down_w8a8(
    hidden: torch.Tensor,
    hidden_scale: torch.Tensor,
    down: torch.Tensor,
    scale: torch.Tensor,
    tile_rows: int,
    table: Table,
    results: torch.Tensor,
    early: bool,
) -> None:
    """Write `results` [M * slots, N] of `hidden`, pairs in their own order.

    early: gate and up of the same table were the launch before.
    """
    width, inner = results.shape[1], hidden.shape[1]
    down_w8a8_kernel[(width // 128, table.entries)](
        hidden,
        hidden_scale,
        down,
        scale,
        *table,
        results,
        len(table.ids),
        table.entries,
        SLOTS=table.ids.shape[1],
        EARLY=early,
        **w8a8_constants(hidden, width, inner, tile_rows),
    )


def launch_moe_hidden(args: Any) -> torch.Tensor:
    x, ids, (experts, both, _) = args.x, args.ids, args.gate_up.shape
    hidden = torch.empty((ids.numel(), both // 2), dtype=x.dtype, device=x.device)
    if ids.numel():
        config = configuration_of(x, ids, experts, args.gate_up_scale, args.prefill)
        table = plan(ids, experts, config.tile_rows)
        multiply_gate_up(config, x, args.gate_up, args.gate_up_scale, table, hidden)
    return hidden


def launch_moe_sums(args: Any) -> torch.Tensor:
    hidden, ids, (experts, width, _) = args.hidden, args.ids, args.down.shape
    out = torch.empty((ids.shape[0], width), dtype=hidden.dtype, device=hidden.device)
    if ids.numel():
        config = configuration_of(hidden, ids, experts, args.down_scale, args.prefill)
        table = plan(ids, experts, config.tile_rows)
        results = torch.empty((ids.numel(), width), dtype=torch.float32, device=hidden.device)
        multiply_down(config, hidden, args.down, args.down_scale, table, results, early=False)
        sum_slots(results, args.weights, out)
    return out


def launch_moe_hidden_w8a8(args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    x, ids, (experts, both, _) = args.x, args.ids, args.gate_up.shape
    pairs, inner = ids.numel(), both // 2
    hidden = torch.empty((pairs, inner), dtype=x.dtype, device=x.device)
    factors = torch.empty((pairs, inner // 128), dtype=torch.float32, device=x.device)
    if pairs:
        tile_rows = w8a8_tile_rows(pairs, experts)
        table = (tile_rows, plan(ids, experts, tile_rows))
        stack = (args.gate_up, args.gate_up_scale)
        multiply_gate_up_w8a8(x, args.x_scale, *stack, *table, hidden, factors, args.out_float32)
    return hidden, factors


def launch_moe_sums_w8a8(args: Any) -> torch.Tensor:
    hidden, ids, (experts, width, _) = args.hidden, args.ids, args.down.shape
    dtype = torch.float32 if args.out_float32 else torch.bfloat16
    out = torch.empty((ids.shape[0], width), dtype=dtype, device=hidden.device)
    if ids.numel():
        tile_rows = w8a8_tile_rows(ids.numel(), experts)
        table = (tile_rows, plan(ids, experts, tile_rows))
        results = torch.empty((ids.numel(), width), dtype=torch.float32, device=hidden.device)
        down = (args.down, args.down_scale)
        multiply_down_w8a8(hidden, args.hidden_scale, *down, *table, results, early=False)
        sum_slots(results, args.weights, out)
    return out
